"""`python -m services.router`."""

from meshfire.runtime.serve import main
from services.router.config import RouterSettings
from services.router.server import build

main("router", build, RouterSettings)

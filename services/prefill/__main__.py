"""`python -m services.prefill`."""

from meshfire.runtime.serve import main
from services.prefill.config import PrefillSettings
from services.prefill.server import build

main("prefill", build, PrefillSettings)

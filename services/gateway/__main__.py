"""`python -m services.gateway`."""

from meshfire.runtime.serve import main
from services.gateway.config import GatewaySettings
from services.gateway.server import build

main("gateway", build, GatewaySettings)

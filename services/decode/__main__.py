"""`python -m services.decode`."""

from meshfire.runtime.serve import main
from services.decode.config import DecodeSettings
from services.decode.server import build

main("decode", build, DecodeSettings)

"""`python -m services.tokenizer`."""

from meshfire.runtime.serve import main
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.server import build

if __name__ == "__main__":
    main("tokenizer", build, TokenizerSettings)

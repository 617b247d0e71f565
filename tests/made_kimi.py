"""A made Kimi model: random weights and the tiny Kimi vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from tests.oracles import make_deepseek_checkpoint
from tests.small_kimi import make_small_kimi


def make_kimi(directory: Path) -> Path:
    """A made Kimi model that speaks the tiny Kimi vocabulary; its own end tokens are words there."""
    make_deepseek_checkpoint(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    kimi = make_small_kimi(directory)
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": list(kimi.end_token_ids)}))
    return directory

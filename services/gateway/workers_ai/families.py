"""Which family a model belongs to: its requests and answers then have that family's form.

Workers AI's older models take a prompt or messages and answer `{"response": …}`; its newer ones speak OpenAI's chat
completions on the same path. A served model's family is told by its name, or by a setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Family = Literal["classic", "chat"]

_CHAT = re.compile(r"kimi|glm-|gpt-oss|nemotron-3|gemma-4|qwen3|deepseek-v4")


def family_of(model: str, chosen: Mapping[str, Family]) -> Family:
    """By the name that the caller used."""
    own = chosen.get(model)
    if own is not None:
        return own
    return "chat" if _CHAT.search(model.lower().rpartition("/")[2]) else "classic"

"""Kimi's control tokens of an output, by id.

Owns their spellings. A vocabulary that lacks one of them speaks another language, and its outputs are plain content.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfire.text.specials import SpecialTokens


class Marker(enum.Enum):
    """What a control token says."""

    THINK_BEGIN = "<think>"
    THINK_END = "</think>"
    SECTION_BEGIN = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"


#: Misspellings of the section's markers that checkpoints write, letter by letter because they are no tokens.
SPELLED = {"<|tool_call_section_begin|>": Marker.SECTION_BEGIN, "<|tool_call_section_end|>": Marker.SECTION_END}


@dataclass(frozen=True)
class Markers:
    """Marker of a token id."""

    by_id: dict[int, Marker]

    @classmethod
    def find(cls, specials: SpecialTokens) -> Markers | None:
        """None if the vocabulary lacks one."""
        tokens = specials.by_content
        if any(marker.value not in tokens for marker in Marker):
            return None
        return cls({tokens[marker.value].token_id: marker for marker in Marker})

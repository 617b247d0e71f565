"""The tokenizer inside a GGUF file, as Hugging Face's tokenizer.json and tokenizer_config.json.

Byte-level BPE only. The pre-tokenizer is named in the file (`tokenizer.ggml.pre`); the ones known here are a table, and
an unknown one is refused, since a wrong one encodes nearly everything right and some things silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshfire.errors import CheckpointError
from meshfire.modelstore.gguf_facts import Facts, wanted


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type` (llama.cpp, enum llama_token_type)."""

    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"gpt-2": _gpt2, "smollm": _single_digits}


def tokenizer(facts: Facts) -> Tokenizer:
    """The tokenizer; ids are positions in the file's token list."""
    if wanted(facts, "tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"GGUF tokenizer {facts['tokenizer.ggml.model']!r}: only 'gpt2' (byte-level BPE) is known"
        )
    name = facts.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(f"GGUF pre-tokenizer {name!r} is not one of {sorted(_PRE_TOKENIZERS)}")
    tokens = list(wanted(facts, "tokenizer.ggml.tokens"))
    merges = [tuple(merge.split(" ")) for merge in wanted(facts, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = _PRE_TOKENIZERS[name]()
    made.decoder = decoders.ByteLevel()
    kinds = facts.get("tokenizer.ggml.token_type", [])
    made.add_special_tokens([_added(tokens[i], True) for i, kind in enumerate(kinds) if kind == _Kind.CONTROL])
    made.add_tokens([_added(tokens[i], False) for i, kind in enumerate(kinds) if kind == _Kind.USER_DEFINED])
    if made.get_vocab_size() != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens, of which {made.get_vocab_size()} are distinct")
    return made


def tokenizer_config(facts: Facts) -> dict[str, Any]:
    """tokenizer_config.json: the generic fast class, which takes tokenizer.json as it is."""
    tokens = wanted(facts, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in names.items()}
    special = {name: tokens[facts[key]] for name, key in keys.items() if key in facts}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(wanted(facts, "llama.context_length")),
        **special,
    }


def _added(content: str, special: bool) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)

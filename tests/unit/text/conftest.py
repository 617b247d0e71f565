"""Small tokenizers, made here, and Kimi K2.5's real one where it lies beside the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshfire.text.hf_tokenizer import HfTokenizer
from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. don't stop 2026!",
    "def f(x):\n    return x + 1\n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "你好，世界。今日は良い天気ですね。 Привет, мир! 🦫🦫 👩‍🌾",
    "system user assistant content im_start im_end think",
]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<think>", "</think>")


def byte_level() -> Tokenizer:
    """Byte-level BPE with all bytes, ChatML tokens, and a post-processor that must not show in prompts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in VISIBLE])
    made.add_tokens([AddedToken("    ", special=False, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return made


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE: "▁" for spaces, one before the first word, bytes for unknown characters."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>|_/.,!"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("o", "u"), ("y", "ou"), ("▁", "you")]
    merges += [("<", "/"), ("</", "s"), ("</s", ">")]
    tokens += [a + b for a, b in merges if a + b not in tokens]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def normalising() -> Tokenizer:
    """As `byte_level`, but composing characters first."""
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


MAKERS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "normalising": normalising,
}


def write_model(directory: Path, tokenizer: Tokenizer, *, template: str | None = CHATML, **config: Any) -> Path:
    """A model directory with everything but weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="session", params=MAKERS)
def any_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MAKERS[request.param]())


@pytest.fixture(scope="session")
def any_tokenizer(any_directory: Path) -> HfTokenizer:
    return HfTokenizer.load(any_directory)


@pytest.fixture(scope="session")
def fallback_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-fallback"), byte_fallback())


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-level"), byte_level())


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> HfTokenizer:
    return HfTokenizer.load(directory)


@pytest.fixture(scope="session")
def kimi_directory() -> Path:
    """Skips, saying why, where the files are not to be had: they are not part of the repository."""
    beside = Path(__file__).parents[4] / "shared" / "data" / "kimi-k2.5"
    chosen = Path(os.environ.get("MESHFIRE_KIMI_DIR", beside))
    if not (chosen / "tiktoken.model").is_file():
        pytest.skip(
            f"no tiktoken.model in {chosen}; set MESHFIRE_KIMI_DIR to a folder with Kimi K2.5's tokenizer files"
        )
    return chosen


@pytest.fixture(scope="session")
def kimi(kimi_directory: Path) -> TiktokenTokenizer:
    return TiktokenTokenizer.load(kimi_directory)

"""Made models: whole, the same for the same seed, and with a tokenizer that gives every id a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshfire.errors import BadInput, CheckpointError, UnknownModel
from meshfire.model import registry
from meshfire.modelstore import make
from meshfire.modelstore.made_configs import MADE_CONFIGS
from meshfire.modelstore.made_tokenizer import END_TOKEN, START_TOKEN, token_ids, write_tokenizer
from meshfire.modelstore.made_weights import parts


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()  # an empty folder may be there already
    for folder, seed in (("a", 4), ("b", 4), ("c", 5)):
        make.make_model("kimi-tiny", tmp_path / folder, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert registry.describe(tmp_path / "a").revision != registry.describe(tmp_path / "c").revision
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_nothing_neutral_is_left_in_the_weights(tmp_path: Path) -> None:
    make.make_model("kimi-tiny", tmp_path / "a")
    layer = load_file(tmp_path / "a" / "model-00002-of-000004.safetensors")
    bias = layer["language_model.model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert (bias != 0).all()
    assert (layer["language_model.model.layers.1.input_layernorm.weight"] != 1).any()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make, "_write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        make.make_model("llama-tiny", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_full_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="kimi-tiny"):
        make.make_model("kimi-huge", tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="not an empty"):
        make.make_model("llama-tiny", tmp_path)


def test_kimi_bench_has_the_sizes_it_is_known_for() -> None:
    text = MADE_CONFIGS["kimi-bench"].text
    assert (text["hidden_size"], text["n_routed_experts"], text["num_experts_per_tok"]) == (1024, 64, 8)
    assert (text["moe_intermediate_size"], text["num_attention_heads"]) == (512, 8)
    assert (text["num_hidden_layers"], text["first_k_dense_replace"]) == (8, 1)
    tensors = [tensor for part in parts(MADE_CONFIGS["kimi-bench"]) for tensor in part]
    assert sum(".experts." in tensor.name for tensor in tensors) == 7 * 64 * 3


@pytest.mark.parametrize("vocab_size", [512, 1024, 8192])
def test_every_id_has_its_own_text_and_text_comes_back(vocab_size: int, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    for token, index in token_ids().items():
        assert tokenizer.token_to_id(token) == index
    text = "Hello wörld, 你好 🙂\n\tthe end  of it"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    chat = f"{START_TOKEN}user\nhi{END_TOKEN}\n"
    ids = tokenizer.encode(chat).ids
    assert ids[0] == token_ids()[START_TOKEN]
    assert tokenizer.decode(ids, skip_special_tokens=False) == chat
    assert tokenizer.decode([ids[0], ids[-1]], skip_special_tokens=True) == "\n"


def test_letter_pairs_are_one_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 1024)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer.encode("abcd").ids) < 4


def test_a_vocabulary_that_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    for vocab_size in (200, 100_000):
        with pytest.raises(CheckpointError, match="vocab_size"):
            write_tokenizer(tmp_path, vocab_size)

"""GGUF files made here from a Hugging Face Llama, converted back: the same logits, tokens and facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from meshfire.errors import CheckpointError
from meshfire.modelstore.gguf_convert import convert
from meshfire.modelstore.gguf_weights import Heads, weights

NUM_HEADS, NUM_KV_HEADS, HIDDEN, INNER, NUM_LAYERS = 4, 2, 64, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
# The first 33..126 of GPT-2's table are the characters themselves; "Ġ" is the space.
LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = ["Ġ a", "1 2", "t h", "th e"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "Ġa", "12", "th", "the", "<tool>"]
KINDS = [3, 3, 3, *[1] * (len(LETTERS) + 4), 4]


def llama(*, tied: bool = True, head_dim: int | None = None) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=head_dim or HIDDEN // NUM_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) / 4)
    return made


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order, row by row: of each head first and second half alternate."""
    head_dim = weight.shape[0] // num_heads
    rows = [
        head * head_dim + half * (head_dim // 2) + index
        for head in range(num_heads)
        for index in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[rows]


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    outer = {"token_embd": model.model.embed_tokens.weight, "output_norm": model.model.norm.weight}
    if not model.config.tie_word_embeddings:
        outer["output"] = model.lm_head.weight
    tensors = {f"{name}.weight": weight for name, weight in outer.items()}
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        inner = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": interleaved(attention.q_proj.weight, NUM_HEADS),
            "attn_k": interleaved(attention.k_proj.weight, NUM_KV_HEADS),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors |= {f"blk.{index}.{name}.weight": weight for name, weight in inner.items()}
    return {name: weight.detach().numpy().copy() for name, weight in tensors.items()}


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    **more: np.ndarray,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(model.config.head_dim)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if change is not None:
        change(writer)
    for name, values in {**gguf_tensors(model), **more}.items():
        if kind is None or values.ndim == 1 or values.shape[1] % 32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path, into: Path) -> Path:
    into.mkdir()
    convert(path, into)
    return into


@pytest.mark.parametrize(("tied", "head_dim"), [(True, None), (False, None), (True, 32)])
def test_the_converted_model_has_the_originals_logits(tmp_path: Path, tied: bool, head_dim: int | None) -> None:
    original = llama(tied=tied, head_dim=head_dim)
    directory = converted(write_gguf(tmp_path / "m.gguf", original), tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    token_ids = torch.randint(0, len(TOKENS), (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(token_ids).logits, original(token_ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "F16"])
def test_quantised_weights_become_the_nearest_float32_to_what_they_say(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    original = llama()
    directory = converted(write_gguf(tmp_path / "m.gguf", original, kind=kind), tmp_path / "model")
    found = load_file(directory / "model.safetensors")
    weight = original.model.layers[1].mlp.down_proj.weight.detach().numpy()
    expected = gguf.dequantize(gguf.quantize(weight, kind), kind)
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], expected)
    rows = original.model.layers[0].self_attn.k_proj.weight.detach()
    kept = torch.from_numpy(gguf.dequantize(gguf.quantize(rows.numpy(), kind), kind))
    # rows are quantised one by one, so reordering them and quantising commute
    np.testing.assert_array_equal(found["model.layers.0.self_attn.k_proj.weight"], kept.numpy())


def test_the_files_say_what_the_gguf_says(tmp_path: Path) -> None:
    directory = converted(write_gguf(tmp_path / "m.gguf", llama()), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-05, 50_000.0, 16)
    assert config["tie_word_embeddings"] is True
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (directory / "chat_template.jinja").read_text() == TEMPLATE


def test_the_tokenizer_cuts_digits_one_by_one_and_knows_its_special_tokens(tmp_path: Path) -> None:
    directory = converted(write_gguf(tmp_path / "m.gguf", llama()), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("the a12").tokens == ["the", "Ġa", "1", "2"]
    assert tokenizer.encode("<|im_end|><tool>").ids == [2, len(TOKENS) - 1]
    assert tokenizer.decode([2, len(TOKENS) - 1]) == "<tool>"
    loaded = PreTrainedTokenizerFast.from_pretrained(directory)
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (2, 1, 2)


def test_a_gpt2_vocabulary_keeps_digits_together(tmp_path: Path) -> None:
    directory = converted(write_gguf(tmp_path / "m.gguf", llama(), pre="gpt-2"), tmp_path / "model")
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architecture": "qwen2"}, "only 'llama'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer": "llama"}, "tokenizer 'llama'"),
        ({"change": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "scaled rotary"),
        ({"change": lambda writer: writer.add_expert_count(8)}, "experts"),
        ({"change": lambda writer: writer.add_rope_dimension_count(8)}, "part of a head"),
        ({"rope_freqs.weight": np.ones(8, np.float32)}, r"rope_freqs\.weight"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama(), **wrong)
    with pytest.raises(CheckpointError, match=message):
        converted(path, tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such thing" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf is no GGUF"):
        converted(tmp_path / "m.gguf", tmp_path / "model")


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama())
    path.write_bytes(path.read_bytes()[:-10_000])
    with pytest.raises(CheckpointError, match="GGUF"):
        converted(path, tmp_path / "model")


@pytest.mark.parametrize("name", ["BF16", "Q4_0", "Q5_0", "Q5_1"])
def test_every_small_block_type_is_read(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    original = llama()
    directory = converted(write_gguf(tmp_path / "m.gguf", original, kind=kind), tmp_path / "model")
    weight = original.model.layers[1].mlp.down_proj.weight.detach().numpy()
    found = load_file(directory / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(found, gguf.dequantize(gguf.quantize(weight, kind), kind))


@pytest.mark.parametrize(("name", "scales_at"), [("Q4_K", (0, 2)), ("Q5_K", (0, 2)), ("Q6_K", (208,))])
def test_k_quantised_tensors_are_read(tmp_path: Path, name: str, scales_at: tuple[int, ...]) -> None:
    kind = gguf.GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(5).integers(0, 256, (6, block_bytes), dtype=np.uint8)
    for at in scales_at:  # float16 0.0117, so that nothing is infinite
        blocks[:, at : at + 2] = np.array([0x00, 0x22], np.uint8)
    raw = blocks.reshape(3, 2 * block_bytes)
    found = list(weights(single_tensor(tmp_path, raw, kind), Heads(4, 2)))
    assert found[0].shape == (3, 512)
    np.testing.assert_array_equal(found[0].read(), gguf.dequantize(raw, kind))


def test_a_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    raw = np.zeros((3, 2 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.IQ2_XS][1]), np.uint8)
    reader = single_tensor(tmp_path, raw, gguf.GGMLQuantizationType.IQ2_XS)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight is IQ2_XS") as raised:
        list(weights(reader, Heads(4, 2)))
    assert raised.value.field == "blk.0.ffn_down.weight"


def single_tensor(directory: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> gguf.GGUFReader:
    writer = gguf.GGUFWriter(directory / "one.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(directory / "one.gguf")

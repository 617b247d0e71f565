"""Names and shapes of a made vision tower and projector (MoonViT-3D), as Kimi K2.5's release spells them.

A text reader passes over all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshfire.modelstore.made_tensor import MadeTensor, biased, layer_norm

_MERGED = 4  # patches that become one token


def tower(vision: Mapping[str, Any]) -> Iterator[MadeTensor]:
    """The encoder of patches."""
    width, inner, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield from biased("vision_tower.patch_embed.proj", (width, 3, patch, patch))
    yield MadeTensor("vision_tower.patch_embed.pos_emb.weight", grid, 0.1)
    for index in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{index}"
        yield from layer_norm(f"{block}.norm0", width)
        yield from layer_norm(f"{block}.norm1", width)
        yield from biased(f"{block}.wqkv", (3 * width, width))
        yield from biased(f"{block}.wo", (width, width))
        yield from biased(f"{block}.mlp.fc0", (inner, width))
        yield from biased(f"{block}.mlp.fc1", (width, inner))
    yield from layer_norm("vision_tower.encoder.final_layernorm", width)


def projector(vision: Mapping[str, Any]) -> Iterator[MadeTensor]:
    """From merged patches to the decoder's width."""
    width, hidden_size = vision["mm_hidden_size"], vision["text_hidden_size"]
    merged = _MERGED * width
    yield from layer_norm("mm_projector.pre_norm", width)
    yield from biased("mm_projector.proj.0", (merged, merged))
    yield from biased("mm_projector.proj.2", (hidden_size, merged))

"""How a made matrix is written: as floats, as packed INT4, or as FP8 blocks, with the parts that releases have.

Owns the rounding (nearest, by each group's or block's largest value) and which matrices a release quantizes. The
reader's rules are in `meshfire.model`; this is the other direction and shares nothing with it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Format = Literal["plain", "int4", "fp8"]

_GROUP_SIZE = 32
_BLOCK_SIZE = 128
_MAX_E4M3 = 448.0
_NEVER = ("embed_tokens", "lm_head", "mlp.gate.", "vision_tower", "mm_projector")
#: as in the release, which leaves the vision tower to its readers' good sense
INT4_IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")


def as_stored(name: str, values: Tensor, form: Format) -> dict[str, Tensor]:
    """What a file holds for the tensor `name`, which is kept as it is unless it is a matrix that `form` quantizes."""
    if form == "plain" or values.ndim != 2 or any(part in name for part in _NEVER):
        return {name: values}
    stem = name.removesuffix(".weight")
    if form == "fp8":
        return _fp8(stem, values.to(torch.float32))
    return _int4(stem, values.to(torch.float32)) if ".mlp.experts." in name else {name: values}


def _int4(stem: str, values: Tensor) -> dict[str, Tensor]:
    groups = values.view(values.shape[0], -1, _GROUP_SIZE)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    nibbles = (groups / scale[:, :, None]).round().clamp(-8, 7).to(torch.int32).view(values.shape[0], -1, 8) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    return {
        f"{stem}.weight_packed": (nibbles << shifts).sum(-1, dtype=torch.int32),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor(values.shape, dtype=torch.int32),
    }


def _fp8(stem: str, values: Tensor) -> dict[str, Tensor]:
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % _BLOCK_SIZE, 0, -rows % _BLOCK_SIZE))
    blocks = padded.view(padded.shape[0] // _BLOCK_SIZE, _BLOCK_SIZE, -1, _BLOCK_SIZE)
    scale = blocks.abs().amax((1, 3)) / _MAX_E4M3
    scaled = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return {f"{stem}.weight": scaled.to(torch.float8_e4m3fn).contiguous(), f"{stem}.weight_scale_inv": scale}

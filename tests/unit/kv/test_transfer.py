"""KV on its way: what is cut must come back equal, and nothing else may pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import KvCorrupt, ModelMismatch
from meshfire.kv import transfer
from meshfire.kv.transfer import Frame, FrameAssembler, KvManifest, Trailer, check_manifest, slice_block
from meshfire.model.interface import KvGeometry

GEOMETRY = KvGeometry(num_layers=5, block_tokens=4, row_width=3, dtype=torch.bfloat16)
MANIFEST = KvManifest("r1", GEOMETRY, 7, (b"a" * 16, b"b" * 16))


def frames_of(blocks: list[int], geometry: KvGeometry = GEOMETRY) -> tuple[list[Frame], dict[int, torch.Tensor]]:
    shape = (geometry.num_layers, geometry.block_tokens, geometry.row_width)
    tensors = {block: torch.randn(shape).to(geometry.dtype) for block in blocks}
    return [frame for block in blocks for frame in slice_block(block, tensors[block], geometry)], tensors


def assemble(frames: list[Frame], wanted: list[int], trailer: Trailer | None = None) -> dict[int, torch.Tensor]:
    assembler = FrameAssembler(GEOMETRY, wanted)
    parts: dict[int, list[torch.Tensor]] = {}
    for frame in frames:
        parts.setdefault(frame.block_index, []).append(assembler.add(frame))
    assembler.finish(trailer or assembler.seen)
    return {block: torch.cat(layers) for block, layers in parts.items()}


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_FRAME_BYTES", 2 * 4 * 3 * 2)  # two layers


@pytest.mark.usefixtures("small_frames")
def test_blocks_cut_into_frames_come_back_bit_for_bit() -> None:
    frames, tensors = frames_of([0, 2, 3])
    assert [(one.block_index, one.layer_start, one.num_layers) for one in frames[:3]] == [
        (0, 0, 2),
        (0, 2, 2),
        (0, 4, 1),
    ]
    back = assemble(frames, [0, 2, 3], Trailer(9, 3 * GEOMETRY.block_bytes))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[block], tensors[block]) for block in tensors)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 600_000))
def test_a_frame_holds_at_most_one_mebibyte_unless_one_layer_is_larger(num_layers: int, row_width: int) -> None:
    geometry = KvGeometry(num_layers, 1, row_width)
    per_frame = transfer.layers_per_frame(geometry)
    layer_bytes = 4 * row_width
    assert per_frame == 1 or per_frame * layer_bytes <= 1 << 20
    assert per_frame >= num_layers or (per_frame + 1) * layer_bytes > 1 << 20


def test_nothing_wanted_is_complete_at_once() -> None:
    FrameAssembler(GEOMETRY, []).finish(Trailer())


def damaged(frame: Frame) -> Frame:
    return replace(frame, data=bytes([frame.data[0] ^ 1]) + frame.data[1:])


@pytest.mark.usefixtures("small_frames")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a flipped bit", lambda frames: [damaged(frames[0]), *frames[1:]]),
        ("a flipped bit in the last frame", lambda frames: [*frames[:-1], damaged(frames[-1])]),
        ("a lost frame", lambda frames: frames[1:]),
        ("a lost tail", lambda frames: frames[:-1]),
        ("a doubled frame", lambda frames: [frames[0], *frames]),
        ("swapped frames", lambda frames: [frames[1], frames[0], *frames[2:]]),
        ("one frame too many", lambda frames: [*frames, frames[-1]]),
        ("short bytes", lambda frames: [replace(frames[0], data=frames[0].data[:-1]), *frames[1:]]),
        ("no layers", lambda frames: [replace(frames[0], num_layers=0, data=b""), *frames[1:]]),
        ("too many layers", lambda frames: [replace(frames[0], num_layers=6), *frames[1:]]),
        ("another block", lambda frames: [replace(frames[0], block_index=1), *frames[1:]]),
    ],
)
def test_a_damaged_stream_is_refused(name: str, change: object) -> None:
    frames, _ = frames_of([0, 2])
    with pytest.raises(KvCorrupt):
        assemble(change(frames), [0, 2])  # type: ignore[operator]


@pytest.mark.parametrize("trailer", [Trailer(1, 0), Trailer(0, GEOMETRY.block_bytes), Trailer(2, GEOMETRY.block_bytes)])
def test_a_trailer_that_counts_otherwise_is_refused(trailer: Trailer) -> None:
    frames, _ = frames_of([0])
    with pytest.raises(KvCorrupt):
        assemble(frames, [0], trailer)


def test_equal_manifests_pass() -> None:
    check_manifest(MANIFEST, replace(MANIFEST))


@pytest.mark.parametrize(
    ("field", "error", "theirs"),
    [
        ("model_revision", ModelMismatch, replace(MANIFEST, model_revision="r2")),
        ("geometry.num_layers", ModelMismatch, replace(MANIFEST, geometry=replace(GEOMETRY, num_layers=6))),
        ("geometry.block_tokens", ModelMismatch, replace(MANIFEST, geometry=replace(GEOMETRY, block_tokens=8))),
        ("geometry.row_width", ModelMismatch, replace(MANIFEST, geometry=replace(GEOMETRY, row_width=9))),
        ("geometry.dtype", ModelMismatch, replace(MANIFEST, geometry=replace(GEOMETRY, dtype=torch.float16))),
        ("num_tokens", KvCorrupt, replace(MANIFEST, num_tokens=8)),
        ("num_blocks", KvCorrupt, replace(MANIFEST, block_hashes=MANIFEST.block_hashes[:1])),
        ("block_hashes[1]", KvCorrupt, replace(MANIFEST, block_hashes=(b"a" * 16, b"x" * 16))),
    ],
)
def test_a_manifest_that_differs_is_refused_by_name(field: str, error: type[Exception], theirs: KvManifest) -> None:
    with pytest.raises(error) as caught:
        check_manifest(MANIFEST, theirs)
    assert caught.value.field == field  # type: ignore[attr-defined]


def test_the_last_block_may_be_partial() -> None:
    assert [MANIFEST.tokens_in(index) for index in range(2)] == [4, 3]

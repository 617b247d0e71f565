"""The tensor codec: exact round trips, and a named error for every way in which bytes and shape can disagree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.api.common.v1 import tensor_pb2 as pb
from meshfire.errors import InvalidTensor
from meshfire.rpc import tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=4), seed=st.integers(0, 2**31))
def test_any_tensor_survives_the_wire_bit_for_bit(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = torch.randint(-(2**15), 2**15, shape, generator=generator).to(dtype)
    message = pb.Tensor.FromString(tensors.encode(sent).SerializeToString())
    got = tensors.decode(message, field="x")
    assert got.dtype is dtype
    assert torch.equal(got, sent)


def test_a_transposed_tensor_is_sent_in_c_order() -> None:
    sent = torch.arange(6, dtype=torch.int32).view(2, 3).T
    assert torch.equal(tensors.decode(tensors.encode(sent), field="x"), sent)


def test_bytes_are_little_endian() -> None:
    assert tensors.encode(torch.tensor([1], dtype=torch.int32)).data == b"\x01\0\0\0"
    assert tensors.encode(torch.tensor([1.0], dtype=torch.bfloat16)).data == b"\x80\x3f"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"\0" * 23), "h.data"),
        (pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"\0" * 25), "h.data"),
        (pb.Tensor(dtype=pb.DATA_TYPE_UNSPECIFIED, shape=[1], data=b""), "h.dtype"),
        (pb.Tensor(dtype=99, shape=[1], data=b""), "h.dtype"),  # type: ignore[arg-type]
        (pb.Tensor(dtype=pb.DATA_TYPE_INT32, shape=[2, 3], data=b"\0" * 24), "h.dtype"),
        (pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[2, 4], data=b"\0" * 32), "h.shape"),
        (pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[6], data=b"\0" * 24), "h.shape"),
        (pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[-1, 3], data=b""), "h.shape"),
    ],
)
def test_a_malformed_tensor_is_refused_and_the_field_named(message: pb.Tensor, field: str) -> None:
    with pytest.raises(InvalidTensor) as caught:
        tensors.decode(message, field="h", dtypes=[pb.DATA_TYPE_FLOAT32], shape=(None, 3))
    assert caught.value.field == field

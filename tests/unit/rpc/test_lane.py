"""Lanes without a shard: frames come out as they went in, however the socket cuts them; a dead peer is seen at once."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.api.common.v1 import tensor_pb2
from meshfire.errors import InvalidTensor, ShardUnavailable
from meshfire.rpc import lane_frame, lane_socket, tensors
from meshfire.rpc.lane_frame import Frame, Kind
from meshfire.rpc.lane_socket import LaneSocket

pytestmark = pytest.mark.skipif(not lane_socket.SUPPORTED, reason="needs Linux's abstract sockets")

LISTENING = """
import sys, time
from meshfire.rpc import lane_socket
listener, name = lane_socket.listen()
print(name, flush=True)
listener.setblocking(True)
lane = lane_socket.accept(listener)
print("accepted", flush=True)
time.sleep(60)
"""


def random_tensor(dtype: torch.dtype, rows: int, columns: int, seed: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (rows, columns), generator=seeded).to(dtype)


frames = st.builds(
    lambda kind, numbers, parts, text: Frame(
        kind,
        *numbers,
        tensors=[(tensors.wire_of(one), one) for one in (random_tensor(*part) for part in parts)],
        text=text,
    ),
    st.sampled_from(Kind),
    st.tuples(st.integers(0, 2**62), st.integers(0, 2**31 - 1), *[st.integers(0, 2**62)] * 4),
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64]),
            st.integers(0, 40),
            st.integers(0, 300),
            st.integers(0, 9),
        ),
        max_size=3,
    ),
    st.binary(max_size=300),
)


def equal(one: Frame, other: Frame) -> bool:
    fields = ("kind", "hop_id", "layer", "epoch", "sent_ns", "queue_ns", "compute_ns", "text")
    return all(getattr(one, name) == getattr(other, name) for name in fields) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one.tensors, other.tensors, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(frames, min_size=1, max_size=4), cuts=st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_frames_survive_any_cut_of_the_stream(sent, cuts):
    bytes_sent = b"".join(bytes(part) for frame in sent for part in lane_frame.pack(frame))
    near, far = socket.socketpair()
    reader = LaneSocket(far)
    received = []
    with near:
        position = 0
        while position < len(bytes_sent):
            position += near.send(bytes_sent[position : position + cuts[position % len(cuts)]])
            while (frame := reader.receive()) is not None:
                received.append(frame)
        assert len(received) == len(sent)
        assert all(map(equal, sent, received))
        assert not reader.broken
    assert reader.receive() is None
    assert reader.broken


def test_what_the_socket_does_not_take_is_sent_when_the_other_side_has_read():
    one, other = (LaneSocket(end) for end in socket.socketpair())
    big = random_tensor(torch.int64, 100, 5000, 1)
    for hop_id in range(3):
        one.send(Frame(Kind.OUTPUT, hop_id, tensors=[(tensors.wire_of(big, fixed=True), big)]))
    assert one.is_choked
    received = []
    while len(received) < 3:
        one.flush()
        frame = other.receive()
        if frame is not None:
            received.append(frame)
    assert not one.is_choked
    assert [frame.hop_id for frame in received] == [0, 1, 2]
    assert all(torch.equal(frame.tensors[0][1], big) for frame in received)


@pytest.mark.parametrize("garbage", [b"\0" * 80, b"\xff" * 80, b"GET / HTTP/1.1\r\n" * 10])
def test_garbage_ends_the_lane_and_makes_no_memory(garbage):
    near, far = socket.socketpair()
    reader = LaneSocket(far)
    with near:
        near.send(garbage)
        assert reader.receive() is None
        assert reader.broken
        assert near.recv(1) == b""


def test_a_body_over_the_limit_is_refused_before_it_is_made():
    head = bytearray(
        bytes(lane_frame.pack(Frame(Kind.HOP, tensors=[(tensor_pb2.DATA_TYPE_INT64, torch.empty(0, 0))]))[0])
    )
    start = lane_frame._HEAD.size - 4 - 24
    head[start : start + 8] = (2**31).to_bytes(4, "little") * 2
    with pytest.raises(InvalidTensor, match="bytes, expected at most"):
        lane_frame.unpack(head, lane_frame.Spares())


def test_released_memory_is_received_into_again_and_memory_in_use_never_is():
    one, other = (LaneSocket(end) for end in socket.socketpair())

    def through(number: int, rows: int = 4) -> Frame:
        tensor = torch.full((rows, 8), number)
        one.send(Frame(Kind.OUTPUT, tensors=[(tensors.wire_of(tensor), tensor)]))
        frame = other.receive()
        assert frame is not None
        assert torch.equal(frame.tensors[0][1], tensor)
        return frame

    first, second = through(1), through(2)
    used = first.tensors[0][1].data_ptr()
    first.release()
    assert not first.tensors
    first.release()  # once is enough
    assert through(3, rows=5).tensors[0][1].data_ptr() != used
    third, fourth = through(4), through(5)
    assert third.tensors[0][1].data_ptr() == used
    assert len({one.tensors[0][1].data_ptr() for one in (second, third, fourth)}) == 3
    assert torch.equal(second.tensors[0][1], torch.full((4, 8), 2))


def test_spares_of_shapes_that_went_out_of_use_do_not_pile_up():
    spares = lane_frame.Spares()
    for rows in range(1, 200):
        spares.keep(tensor_pb2.DATA_TYPE_FLOAT32, spares.take(tensor_pb2.DATA_TYPE_FLOAT32, rows, 2))
        assert sum(map(len, spares._kept.values())) == spares._num_kept <= 16


def test_text_of_traces_and_fault_comes_back():
    for traces, fault in (([], ""), (["a"], ""), (["a", "b"], "expert:kill"), ([], "expert-0:delay=1s")):
        assert lane_frame.split_text(lane_frame.join_text(traces, fault)) == (traces, fault)


def test_nobody_listens_under_an_unknown_or_empty_name():
    for name in ("", "nobody"):
        with pytest.raises(ShardUnavailable, match="socket"):
            lane_socket.connect(name)


def test_another_users_process_is_refused_on_both_sides(monkeypatch):
    listener, name = lane_socket.listen()
    with listener:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ShardUnavailable, match="another user"):
            lane_socket.connect(name)
        assert lane_socket.accept(listener) is None


def test_kill_9_ends_a_lane_at_once_and_leaves_no_name_behind():
    process = subprocess.Popen([sys.executable, "-c", LISTENING], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        lane = lane_socket.connect(name)
        assert process.stdout.readline() == "accepted\n"
        assert lane.receive() is None
        assert not lane.broken
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert lane.receive() is None
    assert lane.broken
    with open("/proc/net/unix") as sockets:
        assert not any(name in line and line.split()[3] == "00010000" for line in sockets)  # nobody listens
    with pytest.raises(ShardUnavailable):
        lane_socket.connect(name)

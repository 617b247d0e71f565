"""A rank other than 0, `python -m meshfire.parallel.follower JSON`: it holds its share of the model and obeys rank 0.

Owns the loop. Ends when rank 0 says so, dies, or cannot be reached.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from json import dumps, loads
from pathlib import Path

import torch
import torch.distributed as dist

from meshfire.errors import MeshfireError, RankLost
from meshfire.kernels.native import kernels
from meshfire.kv.store import KvStore
from meshfire.model import registry
from meshfire.model.interface import CausalLM, KvGeometry
from meshfire.model.partition import Partition
from meshfire.parallel.commands import HEADER_SIZE, Command, decode_batch
from meshfire.parallel.experts import FollowerExperts
from meshfire.parallel.group import LOOPBACK, RankGroup
from meshfire.parallel.kv_memory import RankKv, SharedMemory
from meshfire.runtime.parent import die_with

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowerSpec:
    """What a rank must know to take part; travels as JSON."""

    rank: int
    size: int
    rendezvous_port: int
    timeout_s: float
    parent_pid: int
    model_dir: str
    dense_slices: int
    block_tokens: int
    compute: str
    kv_dtype: str
    num_blocks: int
    num_threads: int
    memory_fd: int
    memory_bytes: int

    def to_json(self) -> str:
        """For the command line."""
        return dumps(asdict(self))


def ready_key(rank: int) -> str:
    """Set at the rendezvous when a rank has loaded its share."""
    return f"ready/{rank}"


def run(spec: FollowerSpec) -> None:
    """Load, then obey until told to stop. Raises RankLost, CheckpointError."""
    store = dist.TCPStore(LOOPBACK, spec.rendezvous_port, is_master=False, timeout=timedelta(seconds=spec.timeout_s))
    group = RankGroup(store, spec.rank, spec.size, timeout_s=spec.timeout_s)
    model = registry.load(
        Path(spec.model_dir),
        dense_slices=spec.dense_slices,
        block_tokens=spec.block_tokens,
        compute=spec.compute,
        partition=Partition(spec.rank, spec.size, group.gather),
    )
    kv = _open_kv(spec, model)
    store.set(ready_key(spec.rank), "1")
    while _obey(group, model, kv):
        pass


def _open_kv(spec: FollowerSpec, model: CausalLM) -> RankKv:
    columns = registry.kv_columns(Path(spec.model_dir))
    dtype: torch.dtype = getattr(torch, spec.kv_dtype)
    geometry = KvGeometry(model.geometry.num_layers, spec.block_tokens, columns.row_width, dtype)
    memory = SharedMemory(spec.memory_fd, spec.memory_bytes)
    return RankKv(KvStore(geometry, spec.num_blocks, memory.values), columns, spec.rank, spec.size)


def _obey(group: RankGroup, model: CausalLM, kv: RankKv) -> bool:
    """One command; False to end. An error that every rank meets alike ends the step, not the rank."""
    command, first, second = group.broadcast(torch.empty(HEADER_SIZE, dtype=torch.int64)).tolist()
    if command == Command.STOP:
        return False
    try:
        if command == Command.FORWARD:
            batch = decode_batch(group.broadcast(torch.empty(first, dtype=torch.int64)))
            model.forward(batch, kv, FollowerExperts(group))
        else:
            model.logits(group.broadcast(torch.empty(first, second)))
    except RankLost:
        raise
    except MeshfireError as error:
        _log.info("rank %d gave up a step: %s", group.rank, error)
    return True


def main() -> None:
    """Entry point of the process."""
    spec = FollowerSpec(**loads(sys.argv[1]))
    die_with(spec.parent_pid)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(spec.num_threads)
    torch.set_grad_enabled(False)
    kernels().set_threads(spec.num_threads)
    _log.info("rank %d, %s", spec.rank, kernels().describe())
    try:
        run(spec)
    except MeshfireError as error:
        _log.error("rank %d ends: %s", spec.rank, error)
        sys.exit(1)


if __name__ == "__main__":
    main()

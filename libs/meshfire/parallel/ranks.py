"""Starts the ranks of a worker and ends them with it.

Owns the child processes. `watch` turns the end of one into an error of the worker: a group without a rank computes
nothing more, so the worker ends too and its supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshfire.errors import RankLost
from meshfire.kv.store import KvStore
from meshfire.model import registry
from meshfire.model.interface import KvGeometry
from meshfire.model.partition import Partition
from meshfire.parallel.follower import FollowerSpec, ready_key
from meshfire.parallel.group import LOOPBACK, RankGroup
from meshfire.parallel.kv_memory import RankKv, SharedMemory
from meshfire.parallel.leader import LeaderModel
from meshfire.runtime.model_thread import ModelThread

_STOP_S = 2.0
_POLL_S = 0.1


@dataclass(frozen=True)
class ModelOptions:
    """How every rank loads the model; as the arguments of `registry.load`."""

    directory: Path
    dense_slices: int
    block_tokens: int
    compute: str


@dataclass(frozen=True)
class RankedModel:
    """A model on all ranks and the cache that they share."""

    model: LeaderModel
    store: KvStore
    _children: tuple[asyncio.subprocess.Process, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of ranks 1, 2, …"""
        return tuple(child.pid for child in self._children)

    async def watch(self) -> None:
        """Raises RankLost when a rank ends."""
        ends = [asyncio.create_task(child.wait()) for child in self._children]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        raise RankLost("a rank of this worker ended; the worker cannot go on without it")


@asynccontextmanager
async def open_ranks(
    options: ModelOptions,
    geometry: KvGeometry,
    num_blocks: int,
    thread: ModelThread,
    *,
    size: int,
    num_threads: int = 1,
    timeout_s: float = 30.0,
    load_timeout_s: float = 600.0,
) -> AsyncIterator[RankedModel]:
    """Load the model on `size` ranks: this process, on `thread`, and size - 1 children.

    `geometry` is of whole KV rows. Raises CheckpointError, RankLost.
    """
    memory = SharedMemory.create(num_blocks * geometry.block_bytes)
    rendezvous = dist.TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    first = FollowerSpec(
        rank=0,
        size=size,
        rendezvous_port=rendezvous.port,
        timeout_s=timeout_s,
        parent_pid=os.getpid(),
        model_dir=str(options.directory),
        dense_slices=options.dense_slices,
        block_tokens=options.block_tokens,
        compute=options.compute,
        kv_dtype=str(geometry.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        num_threads=num_threads,
        memory_fd=memory.fd,
        memory_bytes=memory.num_bytes,
    )
    children: list[asyncio.subprocess.Process] = []
    try:
        for rank in range(1, size):
            children.append(await _start(replace(first, rank=rank)))
        store = KvStore(geometry, num_blocks, memory.values)
        model = await thread.run(_lead, rendezvous, options, store, size, timeout_s)
        await _until_ready(rendezvous, children, time.monotonic() + load_timeout_s)
        yield RankedModel(model, store, tuple(children))
        await thread.run(_stop, model)
    finally:
        memory.close_fd()
        await asyncio.gather(*(_end(child) for child in children))


async def _start(spec: FollowerSpec) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshfire.parallel.follower", spec.to_json(), pass_fds=(spec.memory_fd,)
    )


def _lead(rendezvous: dist.Store, options: ModelOptions, store: KvStore, size: int, timeout_s: float) -> LeaderModel:
    group = RankGroup(rendezvous, 0, size, timeout_s=timeout_s)
    share = registry.load(
        options.directory,
        dense_slices=options.dense_slices,
        block_tokens=options.block_tokens,
        compute=options.compute,
        partition=Partition(0, size, group.gather),
    )
    columns = registry.kv_columns(options.directory)
    return LeaderModel(share, store, RankKv(store, columns, 0, size), group)


async def _until_ready(rendezvous: dist.Store, children: list[asyncio.subprocess.Process], deadline: float) -> None:
    keys = [ready_key(rank) for rank in range(1, len(children) + 1)]
    while not rendezvous.check(keys):
        if any(child.returncode is not None for child in children):
            raise RankLost("a rank of this worker could not load its share; its log says why")
        if time.monotonic() > deadline:
            raise RankLost("the ranks of this worker did not load their shares in time")
        await asyncio.sleep(_POLL_S)


def _stop(model: LeaderModel) -> None:
    try:
        model.stop()
    except RankLost:
        return  # what is left is ended by its parent


async def _end(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()

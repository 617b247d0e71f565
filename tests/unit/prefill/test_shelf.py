"""Offered KV that nobody fetches, and conservation of blocks whatever readers do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import MeshfireError
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.lease import LeaseTimeouts
from meshfire.kv.transfer import KvManifest
from meshfire.worker.lease_key import LeaseKey
from services.prefill.prompt import Prefilled, Prompt
from services.prefill.shelf import KvShelf
from tests.unit.prefill.fakes import GEOMETRY, until


def prompt(request_id: str = "r1", deadline: float = 1e12) -> Prompt:
    return Prompt(LeaseKey("router-1", request_id, 1), (1, 2), "", deadline, "")


def prefilled(pool: BlockPool) -> Prefilled:
    blocks = tuple(pool.allocate(2))
    hashes = tuple(bytes([block]) * 16 for block in blocks)
    for block, name in zip(blocks, hashes):
        pool.publish(block, name)
    return Prefilled(blocks, KvManifest("rev", GEOMETRY, 8, hashes), torch.zeros(2), 0)


async def test_an_offer_that_nobody_fetches_expires_and_leaves_its_blocks_as_prefix_cache() -> None:
    pool = BlockPool(4)
    shelf = KvShelf(pool, "prefill-0", LeaseTimeouts(offered_s=0.02))
    async with asyncio.TaskGroup() as tasks:
        expiry = tasks.create_task(shelf.expire())
        await asyncio.sleep(0)
        shelf.offer(prompt(), prefilled(pool))
        await asyncio.wait_for(shelf.empty.wait(), 10)
        expiry.cancel()
    assert (pool.num_free, pool.num_cached) == (4, 2)


async def test_no_offer_outlives_its_request() -> None:
    pool = BlockPool(4)
    shelf = KvShelf(pool, "prefill-0", LeaseTimeouts())
    async with asyncio.TaskGroup() as tasks:
        expiry = tasks.create_task(shelf.expire())
        shelf.offer(prompt(deadline=time.monotonic() + 0.02), prefilled(pool))
        await asyncio.wait_for(shelf.empty.wait(), 10)
        expiry.cancel()


async def test_a_granted_lease_whose_reader_never_comes_expires_too() -> None:
    pool = BlockPool(4)
    shelf = KvShelf(pool, "prefill-0", LeaseTimeouts(offered_s=60, granted_s=0.02))
    async with asyncio.TaskGroup() as tasks:
        expiry = tasks.create_task(shelf.expire())
        lease = shelf.offer(prompt(), prefilled(pool))
        await asyncio.sleep(0)
        shelf.grant(lease.lease_id, 1, "decode-1")
        await until(lambda: len(shelf) == 0)
        expiry.cancel()
    pool.check()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_blocks_are_conserved_whatever_order_readers_and_owner_act_in(seed: int) -> None:
    asyncio.run(_act_at_random(random.Random(seed)))


async def _act_at_random(rng: random.Random) -> None:
    pool = BlockPool(6)
    shelf = KvShelf(pool, "prefill-0", LeaseTimeouts(), grant_wait_s=0)
    leases, reads = [], []

    async def act() -> None:
        choice = rng.randrange(6)
        lease_id = rng.choice(leases) if leases else "none"
        epoch, reader = rng.choice([(1, "a"), (1, "b"), (2, "b")])
        if choice == 0 and pool.num_free >= 2:
            leases.append(shelf.offer(prompt(f"r{len(leases)}"), prefilled_anew(pool, len(leases))).lease_id)
        elif choice == 1:
            shelf.grant(lease_id, epoch, reader)
        elif choice == 2:
            reads.append((await shelf.begin_read(lease_id, epoch, reader)).__enter__())
        elif choice == 3 and reads:
            read = reads.pop(rng.randrange(len(reads)))
            if rng.random() < 0.5:
                read.complete()
            read.__exit__(None, None, None)
        elif choice == 4:
            shelf.release(lease_id, epoch, reader, acknowledged=rng.random() < 0.5)
        elif rng.random() < 0.2:
            shelf.withdraw(lambda one: one.key.request_id == f"r{rng.randrange(len(leases) + 1)}")

    for _ in range(60):
        with contextlib.suppress(MeshfireError):
            await act()
        pool.check()
    for read in reads:
        read.__exit__(None, None, None)
    shelf.withdraw(lambda _: True)
    assert pool.num_free == 6
    assert shelf.empty.is_set()
    pool.check()


def prefilled_anew(pool: BlockPool, number: int) -> Prefilled:
    blocks = tuple(pool.allocate(2))
    hashes = tuple(f"{number}-{index}".encode() for index in range(2))
    pool.publish(blocks[0], hashes[0])
    return Prefilled(blocks, KvManifest("rev", GEOMETRY, 8, hashes), torch.zeros(2), 0)

"""Runs one item: its calls one beside the other, each as any other request but for its priority and its books.

Owns what an item's result is and what it costs. What a failure means for the item is the runner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshfire.api.router.v1 import inference_service_pb2 as generate_pb
from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import InternalError, MeshfireError
from meshfire.store.job_values import Claim
from meshfire.store.ledger import Line
from services.router.admission import Call
from services.router.billing import Payer
from services.router.generate import Parts, generate
from services.router.hooks import Hooks


@dataclass(frozen=True)
class ItemDone:
    """The outcome of an item with outputs, and the lines of its ledger."""

    outcome: pb.JobOutcome
    lines: Sequence[Line]


class _OneLine:
    """`Books` of one call: its line goes into the ledger together with the item's result, not before."""

    def __init__(self) -> None:
        self.line: Line | None = None

    def enter(self, line: Line) -> None:
        """Keep it."""
        self.line = line


async def run_item(parts: Parts, claim: Claim, deadline_s: float) -> ItemDone:
    """All calls of an item. Raises the MeshfireError of the first one that fails; the others are then stopped."""
    item = pb.JobItem.FromString(claim.request)
    paid: set[int] = set()
    work = []
    for call in item.calls:
        work.append((call.request, call.prompt_index not in paid))
        paid.add(call.prompt_index)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run_call(parts, claim, request, deadline_s, pays_for_prompt=pays), name="job-call")
                for request, pays in work
            ]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    results = [task.result() for task in tasks]
    lines = [
        replace(line, request_id=f"{claim.job_id}-{claim.position}-{index}")
        for index, (_, line) in enumerate(results)
        if line is not None
    ]
    return ItemDone(pb.JobOutcome(outputs=[output for output, _ in results]), lines)


async def _run_call(
    parts: Parts, claim: Claim, request: generate_pb.GenerateRequest, deadline_s: float, *, pays_for_prompt: bool
) -> tuple[pb.JobOutput, Line | None]:
    asked = generate_pb.GenerateRequest()
    asked.CopyFrom(request)
    asked.priority = generate_pb.PRIORITY_ASYNCHRONOUS
    asked.reject_if_busy = False
    books, said = _OneLine(), _Said()
    call = Call(asked, Hooks(), deadline_s, "", Payer(claim.account_id, claim.key_id, pays_for_prompt))
    await generate(replace(parts, books=books), call, said.add)
    return said.output(), books.line


class _Said:
    """What a call said, with all its deltas as one."""

    def __init__(self) -> None:
        self._before: list[generate_pb.GenerateResponse] = []
        self._delta = generate_pb.GenerateDelta()
        self._finished: generate_pb.GenerateResponse | None = None

    async def add(self, message: generate_pb.GenerateResponse) -> None:
        kind = message.WhichOneof("event")
        if kind == "delta":
            self._delta.text += message.delta.text
            self._delta.token_ids.extend(message.delta.token_ids)
            self._delta.logprobs.extend(message.delta.logprobs)
            self._delta.events.extend(message.delta.events)
        elif kind == "finished":
            self._finished = message
        else:
            self._before.append(message)

    def output(self) -> pb.JobOutput:
        assert self._finished is not None, "a call that raised nothing has finished"
        return pb.JobOutput(messages=[*self._before, generate_pb.GenerateResponse(delta=self._delta), self._finished])


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [failures]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        else:
            leaves.append(one)
    return next((one for one in leaves if isinstance(one, MeshfireError)), InternalError(str(leaves[0])))

"""Asking an in-process mesh over gRPC and HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from meshfire.client import Delta, Finished, Prompt, Sampling
from tests.mesh.harness import InProcessMesh


@dataclass(frozen=True)
class Answer:
    """One whole output."""

    deltas: Sequence[Delta]
    finished: Finished

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[float]:
        return [one.logprob for delta in self.deltas for one in delta.logprobs]


async def ask(
    mesh: InProcessMesh,
    prompt: Prompt,
    sampling: Sampling,
    model: str = "m",
    *,
    metadata: Mapping[str, str] | None = None,
    timeout_s: float = 40,
) -> Answer:
    """Everything that Generate says."""
    deltas: list[Delta] = []
    finished: Finished | None = None
    async for event in mesh.client.generate(model, prompt, sampling, metadata=metadata, timeout_s=timeout_s):
        if isinstance(event, Delta):
            deltas.append(event)
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None, "the last message is Finished"
    return Answer(deltas, finished)


async def post(mesh: InProcessMesh, path: str, **request: Any) -> httpx.Response:
    """One POST to the gateway."""
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        return await client.post(f"{mesh.http_url}{path}", **request)


def script(**members: Any) -> dict[str, str]:
    """The header of a script."""
    return {"x-meshfire-script": base64.b64encode(json.dumps(members).encode()).decode()}

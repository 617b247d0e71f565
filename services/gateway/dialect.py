"""The port between the HTTP machinery and a wire format. A new dialect is one package with these and one route line.

Owns no format. `services.gateway.openai` is the first implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshfire.api.router.v1 import inference_service_pb2 as pb
from services.gateway.errors import HttpError
from services.gateway.outputs import Output, Piece

Json = dict[str, Any]


class Renderer(Protocol):
    """Writes one answer in the dialect's words. One per request, so it may keep state over chunks."""

    def chunks(self, output: Output, piece: Piece) -> list[Json]:
        """Events of a stream for what just came; `output` already holds it. Empty = nothing worth sending."""

    def closing(self, outputs: Sequence[Output]) -> list[Json]:
        """Events after the last output ended."""

    def whole(self, outputs: Sequence[Output]) -> Json:
        """The whole answer of a request that does not stream."""


class Job(Protocol):
    """A request that passed the dialect's schema."""

    @property
    def model(self) -> str:
        """Name of the model, as asked for."""

    @property
    def stream(self) -> bool:
        """True = server-sent events."""

    @property
    def calls(self) -> Sequence[Call]:
        """The Generate calls it takes: at least one."""

    def renderer(self, request_id: str, created: int) -> Renderer:
        """How the answer is written. `created` is Unix time in seconds."""


class Dialect(Protocol):
    """One endpoint's wire format."""

    def at(self, path: Mapping[str, str]) -> Dialect:
        """For a request whose route had these parts; most formats do not care."""

    def parse(self, body: object) -> Job:
        """What a JSON body asks for. Raises HttpError naming the field."""

    def explain(self, error: HttpError) -> HttpError:
        """The same error with the router's field path in the caller's words."""

    def error_body(self, error: HttpError) -> Json:
        """An error in the dialect's shape."""


@dataclass(frozen=True)
class Call:
    """One Generate call of a job. Calls of equal `prompt_index` share a prompt, whose tokens count once."""

    prompt_index: int
    request: pb.GenerateRequest

"""`meshfire chat`: talk to a model of a running mesh."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field

import click

from meshfire.cli.options import mesh_option
from meshfire.client import Delta, Finished, MeshfireClient, Message, Sampling, Started
from meshfire.cluster import state
from meshfire.errors import MeshfireError, UnknownModel


@dataclass
class Timing:
    """When an answer's tokens came."""

    sent: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0

    def took(self, num_tokens: int) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.num_tokens += num_tokens

    def __str__(self) -> str:
        if self.first is None or self.last is None:
            return "no token"
        spent_s = self.last - self.first
        speed = f"{(self.num_tokens - 1) / spent_s:.1f} tokens/s" if self.num_tokens > 1 and spent_s else "-"
        return f"first token after {1000 * (self.first - self.sent):.0f} ms, then {speed}"


@click.command()
@click.argument("question", required=False)
@mesh_option
@click.option("--address", help="HOST:PORT of a router; default: that of the mesh.")
@click.option("--model", help="Default: the first that is served.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), help="New tokens at most.")
@click.option("--temperature", type=click.FloatRange(0, 5), help="0 = always the likeliest token.")
@click.option("--seed", type=int)
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds for each answer.")
@click.option("--stats", is_flag=True, help="Tokens, speed, workers and trace id after each answer, on stderr.")
def chat(
    question: str | None,
    mesh: str,
    address: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    timeout_s: float,
    stats: bool,
) -> None:
    """Ask QUESTION, or talk without one (an empty line or Ctrl-D ends)."""
    target = address or state.read(mesh).first("router").address
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    session = _Session(target, model, sampling, timeout_s, stats)
    if system:
        session.messages.append(Message("system", system))
    asyncio.run(session.ask_once(question) if question else session.talk())


class _Session:
    def __init__(self, target: str, model: str | None, sampling: Sampling, timeout_s: float, stats: bool) -> None:
        self.messages: list[Message] = []
        self._target = target
        self._model = model
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._stats = stats

    async def ask_once(self, question: str) -> None:
        async with MeshfireClient(self._target) as client:
            await self._answer(client, question)

    async def talk(self) -> None:
        async with MeshfireClient(self._target) as client:
            while question := await asyncio.to_thread(_read_line):
                try:
                    await self._answer(client, question)
                except MeshfireError as error:
                    self.messages.pop()
                    click.echo(f"meshfire: {error}", err=True)

    async def _answer(self, client: MeshfireClient, question: str) -> None:
        model = self._model or await _first_model(client)
        self.messages.append(Message("user", question))
        parts: list[str] = []
        timing = Timing()
        trace_id, finished = "", None
        events = client.generate(model, self.messages, self._sampling, timeout_s=self._timeout_s)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Started):
                    trace_id = event.trace_id
                elif isinstance(event, Delta):
                    timing.took(len(event.token_ids))
                    parts.append(event.text)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, Finished):
                    finished = event
        click.echo()
        self.messages.append(Message("assistant", "".join(parts)))
        if self._stats and finished:
            _print_stats(finished, timing, trace_id)


async def _first_model(client: MeshfireClient) -> str:
    models = await client.list_models()
    if not models:
        raise UnknownModel("this mesh serves no model now", field="model")
    return models[0].name


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _print_stats(finished: Finished, timing: Timing, trace_id: str) -> None:
    usage, receipt = finished.usage, finished.receipt
    prefill = receipt.prefill_worker_id or "by decode"
    click.echo(
        f"[{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_tokens} cached), "
        f"{usage.num_output_tokens} output tokens, {finished.finish_reason}; {timing}]\n"
        f"[prefill {prefill}, decode {receipt.decode_worker_id}, {receipt.kv_bytes} B of KV, "
        f"{receipt.num_failovers} failovers]\n"
        f"[trace {trace_id}]",
        err=True,
    )

"""Which models can be served now, as the worker table tells."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from meshfire.errors import NoWorker, UnknownModel
from services.router.lifecycle_events import Stage
from services.router.workers import WorkerTable


@dataclass(frozen=True)
class ModelFacts:
    """A served model. A request must fit every worker that may get it, so limits are the smallest of them."""

    name: str
    revision: str
    context_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int]
    #: of the prefill workers' prefix cache
    block_tokens: int


def facts_of(table: WorkerTable, name: str) -> ModelFacts | None:
    """The model, if a prefill and a decode worker that fit together serve it."""
    workers = [facts for pair in table.pairs(name) for facts in pair]
    if not workers:
        return None
    return ModelFacts(
        name=name,
        revision=workers[0].revision,
        context_tokens=min(worker.context_tokens for worker in workers),
        vocab_size=min(worker.vocab_size for worker in workers),
        end_token_ids=workers[0].end_token_ids,
        block_tokens=workers[0].geometry.block_tokens,
    )


def served_models(table: WorkerTable) -> list[ModelFacts]:
    """All models that can be served now, by name."""
    found = (facts_of(table, name) for name in table.models())
    return [facts for facts in found if facts is not None]


async def wait_for_model(table: WorkerTable, name: str, wait_s: float) -> ModelFacts:
    """The model. UnknownModel at once if it was never seen; NoWorker if its workers stay away for `wait_s`."""
    changed = asyncio.Event()
    stop_listening = table.listen(changed.set)
    try:
        async with asyncio.timeout(wait_s):
            while (facts := facts_of(table, name)) is None:
                if not table.has_seen(name):
                    raise UnknownModel(f"no model {name!r} is served here", field="model", metadata={"model": name})
                changed.clear()
                await changed.wait()
            return facts
    except TimeoutError:
        raise no_worker(table, name) from None
    finally:
        stop_listening()


def no_worker(table: WorkerTable, name: str) -> NoWorker:
    """The error that says what is missing."""
    missing = [stage for stage, there in stages_present(table, name).items() if not there]
    what = f"no {' and no '.join(missing)} worker" if missing else "no prefill and decode worker that fit together"
    return NoWorker(f"model {name!r} has {what} now", retry_after_s=1.0, metadata={"model": name})


def stages_present(table: WorkerTable, name: str) -> dict[str, bool]:
    """Per stage, whether the model has a worker."""
    return {stage.value: bool(table.of(name, stage)) for stage in Stage}

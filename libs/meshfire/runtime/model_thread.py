"""One thread for numerics, so that the event loop never waits for a matrix product."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from meshfire.kernels.native import kernels

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class ModelThread:
    """Runs calls one after the other on one thread. `num_threads`: threads per operator (process-wide)."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=_set_threads, initargs=(num_threads,)
        )

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` on the thread. A cancelled caller does not interrupt it: the result is dropped."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: fn(*args, **kwargs))

    def close(self) -> None:
        """Wait for the running call, drop waiting ones, end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _set_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    kernels().set_threads(num_threads)
    _log.info("%s", kernels().describe())

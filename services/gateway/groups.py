"""From a task group's many exceptions to the one that an answer can name."""

from __future__ import annotations

from services.gateway.errors import ClientGone


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The client's departure if it is there (what else failed no longer matters), else the first leaf."""
    leaves = _leaves(group)
    return next((one for one in leaves if isinstance(one, ClientGone)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found

"""Log-probabilities of a prompt as messages to its router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.model.sampling import TokenLogprobs
from meshfire.worker.lease_key import LeaseKey

#: With 20 likeliest tokens at each place about 200 KB: a step's progress does not wait long behind it.
LOGPROBS_PER_MESSAGE = 1024


def messages_of(key: LeaseKey, first_index: int, logprobs: Sequence[TokenLogprobs]) -> Iterator[pb.WorkRequest]:
    """In parts, of the prompt's tokens from `first_index` on; nothing for none."""
    for start in range(0, len(logprobs), LOGPROBS_PER_MESSAGE):
        part = pb.PromptLogprobs(request_id=key.request_id, epoch=key.epoch, first_index=first_index + start)
        for one in logprobs[start : start + LOGPROBS_PER_MESSAGE]:
            part.logprobs.add(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
        yield pb.WorkRequest(prompt_logprobs=part)

"""What a GenerateRequest must be like: pure checks that raise BadInput with the field's path.

`check_form` needs no model; `check_fit` holds the request against the model that it names. Chats are rendered, and
their roles and templates judged, by the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.errors import BadInput, InvalidPrompt, PromptTooLong
from services.router.models import ModelFacts

MAX_STOP_TEXTS = 16


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above_low` leaves `low` itself out."""

    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        # NaN compares false with everything and so lies in no range.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"{'above' if self.above_low else 'from'} {self.low:g} to {self.high:g}"


#: Of every optional number of SamplingParams. `seed` takes any.
RANGES: dict[str, Range] = {
    "max_tokens": Range(0),
    "min_tokens": Range(0),
    "temperature": Range(0, 5),
    "top_p": Range(0, 1, above_low=True),
    "top_k": Range(0),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, above_low=True),
    "num_logprobs": Range(0, 20),
    "num_prompt_logprobs": Range(0, 20),
}
LOGIT_BIAS = Range(-100, 100)


def check_form(request: pb.GenerateRequest) -> None:
    """Everything that can be told without the model."""
    if not request.model:
        raise BadInput("model is empty", field="model")
    if request.priority not in pb.Priority.values():
        raise BadInput(f"priority {request.priority} is not known", field="priority")
    check_prompt(request)
    check_sampling(request.sampling)
    if asks_for_no_output(request) and not wants_prompt(request):
        message = "sampling.max_tokens is 0, expected at least 1 where neither echo nor num_prompt_logprobs is set"
        raise BadInput(message, field="sampling.max_tokens")
    if request.HasField("rule") and request.sampling.ignore_eos:
        message = "ignore_eos cannot be combined with a rule: such an output ends where its rule is complete"
        raise BadInput(message, field="sampling.ignore_eos")


def wants_prompt(request: pb.GenerateRequest) -> bool:
    """Whether the prompt is part of the answer."""
    return request.echo or request.sampling.HasField("num_prompt_logprobs")


def asks_for_no_output(request: pb.GenerateRequest) -> bool:
    """The prompt is all that is wanted."""
    return request.sampling.HasField("max_tokens") and request.sampling.max_tokens == 0


def check_prompt(request: pb.GenerateRequest | pb.CountTokensRequest) -> None:
    """There is one, and it is not empty."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise BadInput("no prompt: set chat, text or token_ids", field="prompt")
    if kind == "chat" and not request.chat.messages:
        raise InvalidPrompt("a chat needs at least one message", field="chat.messages")
    if kind == "text" and not request.text:
        raise InvalidPrompt("text is empty", field="text")
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids" and not request.token_ids.ids:
        raise InvalidPrompt("token_ids is empty", field="token_ids.ids")


def check_sampling(sampling: sampling_pb2.SamplingParams) -> None:
    """Every number in its range, every stop text usable."""
    for name, allowed in RANGES.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            _check_range(f"sampling.{name}", getattr(sampling, name), allowed)
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"sampling.logit_bias[{token_id}]", bias, LOGIT_BIAS)
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        message = f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}"
        raise BadInput(message, field="sampling.min_tokens")
    if len(sampling.stop) > MAX_STOP_TEXTS:
        raise BadInput(f"{len(sampling.stop)} stop texts, at most {MAX_STOP_TEXTS}", field="sampling.stop")
    for index, text in enumerate(sampling.stop):
        if not text:
            raise BadInput("a stop text is empty", field=f"sampling.stop[{index}]")


def check_fit(request: pb.GenerateRequest, facts: ModelFacts, prompt: Sequence[int]) -> None:
    """Ids below the vocabulary's size; a prompt that leaves room for at least one token, if one is wanted."""
    field = request.WhichOneof("prompt") or "prompt"
    if not prompt:
        raise InvalidPrompt("the prompt has no tokens", field=field)
    if len(prompt) + (0 if asks_for_no_output(request) else 1) > facts.context_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens; the context of {facts.name} has {facts.context_tokens}, "
            "of which one is kept for the output",
            field=field,
            metadata={"num_prompt_tokens": str(len(prompt)), "context_tokens": str(facts.context_tokens)},
        )
    # Text becomes tokens of the model's own vocabulary; only ids that the caller names can miss it.
    if field == "token_ids":
        _check_ids("token_ids.ids[{}]", prompt, facts)
    _check_ids("sampling.stop_token_ids[{}]", request.sampling.stop_token_ids, facts)
    for token_id in request.sampling.logit_bias:
        _check_id(f"sampling.logit_bias[{token_id}]", token_id, facts)


def _check_range(field: str, value: float, allowed: Range) -> None:
    if value not in allowed:
        raise BadInput(f"{field} is {value:g}, expected {allowed}", field=field)


def _check_ids(field: str, token_ids: Sequence[int], facts: ModelFacts) -> None:
    for index, token_id in enumerate(token_ids):
        _check_id(field.format(index), token_id, facts)


def _check_id(field: str, token_id: int, facts: ModelFacts) -> None:
    if not 0 <= token_id < facts.vocab_size:
        message = f"token id {token_id} is outside the vocabulary of {facts.name}, 0 to {facts.vocab_size - 1}"
        raise BadInput(message, field=field)

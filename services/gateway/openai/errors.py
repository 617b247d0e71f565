"""Errors in OpenAI's shape, and field paths in the caller's words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from services.gateway.dialect import Json
from services.gateway.errors import HttpError
from services.gateway.openai.marks import NOT_SUPPORTED

_CODES = {
    "missing": "missing_required_parameter",
    "no_content": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    NOT_SUPPORTED: "unsupported_parameter",
    "unsupported_part": "unsupported_value",
    "unsupported_role": "unsupported_value",
}
#: Names come from the caller and may be of any length.
MAX_PATH_CHARS = 200
#: pydantic's step for "the key of this entry"
_KEY = "[key]"
_MESSAGES = {"missing": "this field is required", "extra_forbidden": "this parameter is not known"}
#: Our reason, in OpenAI's word for it.
_OPENAI_CODES = {"unknown_model": "model_not_found", "prompt_too_long": "context_length_exceeded"}
#: Router's path → body's path. Order matters: the first that fits is taken.
_PATHS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"^sampling\.logit_bias.*"), "logit_bias"),
    (re.compile(r"^sampling\.num_(prompt_)?logprobs$"), "logprobs"),
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^chat\.tools\[(\d+)\]\.parameters_json"), r"tools[\1].function.parameters"),
    (re.compile(r"^rule\.calls.*"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\..*"), "response_format"),
    (re.compile(r"^chat\.template_kwargs_json"), "chat_template_kwargs"),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^chat\."), ""),
    (re.compile(r"^token_ids(\.ids)?"), "prompt"),
    (re.compile(r"^text$"), "prompt"),
    (re.compile(r"^session_key$"), "prompt_cache_key"),
)


def body_of(error: HttpError) -> Json:
    """`{"error": {…}}` as OpenAI's SDKs read it."""
    kind = "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def in_callers_words(error: HttpError) -> HttpError:
    """The router's error for a caller who never saw the router's request."""
    code = _OPENAI_CODES.get(error.code or "", error.code)
    return HttpError(error.status, error.message, path_in_body(error.param), code, error.headers)


def path_in_body(field: str | None) -> str | None:
    """`sampling.top_p` → `top_p`, `chat.messages[0].role` → `messages[0].role`, `token_ids.ids[3]` → `prompt[3]`."""
    if field is None:
        return None
    for pattern, word in _PATHS:
        if pattern.search(field):
            return pattern.sub(word, field)
    return field


def from_validation(error: ValidationError) -> HttpError:
    """400 for the first thing that is wrong. The offending value is never repeated: it may be huge, or a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    path = context.get("param") or _path(first["loc"]) + _suffix(kind, context)
    words = _MESSAGES.get(kind, first["msg"])
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    # The keys of logit_bias are data: the parameter is the map.
    param = "logit_bias" if path.startswith("logit_bias.") else path
    return HttpError(400, f"{path}: {words}", param, code)


def _suffix(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "unsupported_part":
        # The part's own key, image_url for an image, is in the body too and says more than `type`.
        return f".{context['type']}"
    return {"unsupported_role": ".role", "no_content": ".content"}.get(kind, "")


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content[1].text`, without the tags of unions (see schema)."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<") and step != _KEY:
            path += f".{step}" if path else step
    return path[:MAX_PATH_CHARS]

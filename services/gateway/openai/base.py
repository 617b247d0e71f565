"""What the dialect's endpoints have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

from pydantic import ValidationError

from services.gateway.dialect import Json
from services.gateway.errors import HttpError
from services.gateway.openai import errors
from services.gateway.openai.strict import Strict

R = TypeVar("R", bound=Strict)


class OpenAiDialect:
    """Errors of `/v1/*`; also those outside any endpoint."""

    def at(self, path: Mapping[str, str]) -> Self:
        return self

    def explain(self, error: HttpError) -> HttpError:
        return errors.in_callers_words(error)

    def error_body(self, error: HttpError) -> Json:
        return errors.body_of(error)


def as_request(schema: type[R], body: object) -> R:
    """The request in a JSON body. Raises HttpError (400) that names the field."""
    if not isinstance(body, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_type")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise errors.from_validation(error) from None

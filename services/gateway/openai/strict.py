"""The base of all request schemas: strict types, no unknown field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """ "5" is no number and 5.0 no count; NaN and infinity are no numbers either."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

"""The price table: which model costs how many neurons.

Owns the built-in rates and how a served model's name leads to one; own models are added by a file. A model without a
price costs nothing, which `rate` says by None. Source: Cloudflare's pricing page of Workers AI, 2026-08-28.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfire.errors import BadInput
from meshfire.metering.neurons import Rate

#: (input, cached or None, output) per million tokens
_BUILT_IN: Mapping[str, tuple[int, int | None, int]] = {
    "moonshotai/kimi-k2.5": (54545, 9091, 272727),
    "moonshotai/kimi-k2.6": (86364, 14545, 363636),
    "moonshotai/kimi-k2.7-code": (86364, 17273, 363636),
    "openai/gpt-oss-120b": (31818, None, 68182),
    "openai/gpt-oss-20b": (18182, None, 27273),
    "zai-org/glm-4.7-flash": (5500, None, 36400),
    "zai-org/glm-5.2": (127273, 23636, 400000),
    "zai-org/glm-5.3": (127273, 23636, 400000),
    "zai-org/glm-5.3-flash": (13636, 2727, 45455),
    "meta/llama-4-scout-17b-16e-instruct": (24545, None, 77273),
    "meta/llama-3.3-70b-instruct-fp8-fast": (26668, None, 204805),
    "meta/llama-3.1-70b-instruct-fp8-fast": (26668, None, 204805),
    "meta/llama-3.1-8b-instruct": (25608, None, 75147),
    "meta/llama-3-8b-instruct": (25608, None, 75147),
    "meta/llama-3.1-8b-instruct-fp8": (13778, None, 26128),
    "meta/llama-3.1-8b-instruct-fp8-fast": (4119, None, 34868),
    "meta/llama-3.1-8b-instruct-awq": (11161, None, 24215),
    "meta/llama-3-8b-instruct-awq": (11161, None, 24215),
    "meta/llama-3.2-1b-instruct": (2457, None, 18252),
    "meta/llama-3.2-3b-instruct": (4625, None, 30475),
    "meta/llama-3.2-11b-vision-instruct": (4410, None, 61493),
    "meta/llama-guard-3-8b": (44003, None, 2730),
    "meta/llama-2-7b-chat-fp16": (50505, None, 606061),
    "mistral/mistral-7b-instruct-v0.1": (10000, None, 17300),
    "mistralai/mistral-small-3.1-24b-instruct": (31876, None, 50488),
    "deepseek-ai/deepseek-r1-distill-qwen-32b": (45170, None, 443756),
    "deepseek-ai/deepseek-v4-flash-0731": (40000, 1273, 120000),
    "deepseek-ai/deepseek-v4-pro-0813": (120000, 4000, 360000),
    "qwen/qwen3-30b-a3b-fp8": (4625, None, 30475),
    "qwen/qwen3.8-27b": (40909, None, 290909),
    "qwen/qwq-32b": (60000, None, 90909),
    "qwen/qwen2.5-coder-32b-instruct": (60000, None, 90909),
    "google/gemma-3-12b-it": (31371, None, 50560),
    "google/gemma-4-26b-a4b": (9091, None, 27273),
    "nvidia/nemotron-3-120b-a12b": (45455, None, 136364),
    "ibm-granite/granite-4.0-h-micro": (1542, None, 10158),
}
_HOST_PREFIX = "@cf/"

Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _FileRate(_Strict):
    """Neurons per million tokens."""

    input: Count
    output: Count
    cached: Count | None = None


class _File(_Strict):
    models: dict[str, _FileRate]


class PriceTable:
    """Rates by model name. `own` rates go before the built-in ones."""

    def __init__(self, own: Mapping[str, Rate] | None = None) -> None:
        self._rates = {name: Rate(input=one[0], cached=one[1], output=one[2]) for name, one in _BUILT_IN.items()}
        self._rates |= {_plain(name): rate for name, rate in (own or {}).items()}
        self._by_last_part: dict[str, str] = {}
        for name in self._rates:
            self._by_last_part[name.rpartition("/")[2]] = name

    @classmethod
    def from_file(cls, path: Path | None) -> PriceTable:
        """The built-in table and what a YAML file adds: `models: {NAME: {input, output, cached}}`. Raises BadInput."""
        if path is None:
            return cls()
        try:
            raw = yaml.safe_load(path.read_text())
            parsed = _File.model_validate(raw)
        except OSError as error:
            raise BadInput(f"the price file {path} cannot be read: {error.strerror}", field="prices") from None
        except yaml.YAMLError as error:
            raise BadInput(f"{path} is not YAML: {error}", field="prices") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "prices"
            raise BadInput(f"{path}: {where}: {first['msg']}", field=where) from None
        return cls({name: Rate(one.input, one.output, one.cached) for name, one in parsed.models.items()})

    def rate(self, model: str) -> Rate | None:
        """Of a model by its full name, with or without `@cf/`, or by the part after the last slash; None = no price."""
        name = self.full_name(model)
        return None if name is None else self._rates[name]

    def full_name(self, model: str) -> str | None:
        """As the table has it; None = no price."""
        name = _plain(model)
        return name if name in self._rates else self._by_last_part.get(name)

    def names(self) -> list[str]:
        """Every model with a price."""
        return sorted(self._rates)


def _plain(model: str) -> str:
    return model.lower().removeprefix(_HOST_PREFIX)

"""`ai/models/search` and `ai/models/schema`: what is served, as Workers AI's catalogue lists it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from meshfire.api.router.v1 import inference_service_pb2 as router_pb
from meshfire.metering.prices import PriceTable
from services.gateway import sse
from services.gateway.access.door import Door
from services.gateway.dialect import Json
from services.gateway.errors import HttpError
from services.gateway.openai.schema import ChatRequest
from services.gateway.routers import Routers
from services.gateway.workers_ai.classic_schema import ClassicRequest
from services.gateway.workers_ai.envelope import enveloped
from services.gateway.workers_ai.families import Family, family_of

_TASK = {
    "id": "c329a1f9-323d-4e91-b2aa-582dd4188d34",
    "name": "Text Generation",
    "description": "Family of generative text models, such as large language models (LLM), that follow prompts.",
}
_MAX_PER_PAGE = 100
_DOLLARS_PER_NEURON = 0.011 / 1000


class Catalogue:
    """Pages of the models that are served now."""

    def __init__(self, routers: Routers, door: Door, families: Mapping[str, Family], timeout_s: float) -> None:
        self._routers = routers
        self._door = door
        self._families = families
        self._timeout_s = timeout_s
        self._prices = PriceTable()
        self._since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")

    async def search(self, request: Request) -> Response:
        """GET ai/models/search"""
        await self._door.enter(request.headers, request.path_params.get("account_id"))
        served = await self._routers.list_models(self._timeout_s)
        query = request.query_params
        found = [one for one in served if self._fits(one, query)]
        page, per_page = _number(query, "page", 1, 10**6), _number(query, "per_page", 50, _MAX_PER_PAGE)
        shown = found[(page - 1) * per_page : page * per_page]
        info = {"page": page, "per_page": per_page, "count": len(shown), "total_count": len(found)}
        return _json(enveloped([self._item(one) for one in shown], result_info=info))

    async def schema(self, request: Request) -> Response:
        """GET ai/models/schema?model="""
        await self._door.enter(request.headers, request.path_params.get("account_id"))
        model = request.query_params.get("model", "")
        if not model:
            raise HttpError(400, "model is missing", "model", "missing_required_parameter")
        schema = ChatRequest if family_of(model, self._families) == "chat" else ClassicRequest
        return _json(enveloped({"input": schema.model_json_schema(), "output": {"type": "object"}}))

    def _fits(self, model: router_pb.Model, query: Mapping[str, str]) -> bool:
        wanted = query.get("search", "").lower()
        author = query.get("author", "").lower()
        task = query.get("task", "").lower()
        return (
            wanted in model.name.lower()
            and (not author or author in model.name.lower())
            and (not task or task in (_TASK["name"].lower(), _TASK["id"]))
        )

    def _item(self, model: router_pb.Model) -> Json:
        properties: list[Json] = [{"property_id": "context_window", "value": str(model.context_tokens)}]
        rate = self._prices.rate(model.name)
        if rate is not None:
            cached = rate.input if rate.cached is None else rate.cached
            units = (("input", rate.input), ("cached input", cached), ("output", rate.output))
            price = [
                {"unit": f"per M {kind} tokens", "price": round(neurons * _DOLLARS_PER_NEURON, 4), "currency": "USD"}
                for kind, neurons in units
            ]
            properties.append({"property_id": "price", "value": price})
        if family_of(model.name, self._families) == "chat":
            properties += [{"property_id": name, "value": "true"} for name in ("function_calling", "reasoning")]
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, model.name)),
            "source": 1,
            "name": model.name,
            "description": f"revision {model.revision}",
            "task": _TASK,
            "created_at": self._since,
            "tags": [],
            "properties": properties,
        }


def _number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise HttpError(400, f"{name} is {text[:20]!r}, expected 1 to {most}", name, "invalid_value")
    return int(text)


def _json(body: Json) -> Response:
    return Response(sse.to_json(body), media_type="application/json")

"""Objects of GET /v1/models. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.api.router.v1 import inference_service_pb2 as pb
from services.gateway.dialect import Json
from services.gateway.errors import HttpError


def listing(models: Sequence[pb.Model], created: int) -> Json:
    """All models. `created` is Unix time; a mesh does not know when a model was made, so its own start is used."""
    return {"object": "list", "data": [_model(model, created) for model in models]}


def single(models: Sequence[pb.Model], name: str, created: int) -> Json:
    """One model. Raises HttpError (404)."""
    for model in models:
        if model.name == name:
            return _model(model, created)
    raise HttpError(404, f"no model {name!r} is served here", "model", "model_not_found")


def _model(model: pb.Model, created: int) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "meshfire",
        "max_model_len": model.context_tokens,
        "revision": model.revision,
    }

"""The topology file: which services and models a local mesh has. One file for `meshfire up` and for the Tiltfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshfire.errors import BadInput
from meshfire.model.compute.names import ComputeName

Count = Annotated[int, Field(ge=0, le=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelTopology(_Strict):
    """One served model and the processes that serve it."""

    #: a name in the model cache, a name that can be pulled, or a directory
    model: str
    #: the name that clients use; default: `model`, or the directory's name
    name: str = ""
    #: prefill workers; 0 = the decode workers compute the prompts too
    prefill: Count = 1
    #: decode workers
    decode: Annotated[int, Field(ge=1, le=64)] = 1
    #: expert shards; 0 = every worker computes its experts itself; None = 2 for a mixture of experts, else 0
    expert_shards: Count | None = None
    #: slices that each dense FFN is cut into, served by the shards; None = one per shard if the model has no experts
    dense_slices: Count | None = None
    #: how the workers compute: auto = at the checkpoint's precision
    compute: ComputeName = "auto"
    #: ranks of each prefill and decode worker, which share its heads, neurons and columns
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    #: who guesses tokens ahead in decode workers, so that one step can choose several: off or prompt-lookup
    speculation: Literal["off", "prompt-lookup"] = "off"
    #: torch threads of each worker
    num_threads: Annotated[int, Field(ge=1)] = 1

    @property
    def served_name(self) -> str:
        """What clients call it."""
        return self.name or Path(self.model).name


class Topology(_Strict):
    """A mesh on one machine."""

    #: names the mesh's state folder
    mesh: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")] = "local"
    #: first port of the processes, counted up; 0 = free ports
    base_port: Annotated[int, Field(ge=0, le=65000)] = 0
    #: the gateway's HTTP port; 0 = a free one
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    #: auto = a Consul agent where one is found, else files; or consul://HOST:PORT, static:/path
    registry: str = "auto"
    #: OTLP/gRPC collector; empty = traces are kept locally
    otlp_endpoint: str = ""
    #: a prompt of which a decode worker lacks at most so many tokens is computed there; 0 = only by prefill workers
    local_prefill_max_tokens: Annotated[int, Field(ge=0)] = 0
    #: accept x-meshfire-script and x-meshfire-fault
    test_hooks: bool = False
    #: ask for API tokens (`meshfire keys create`); without them the mesh is open, on loopback only
    keys: bool = False
    #: accounts, keys and ledger: sqlite:///PATH or postgresql://…; empty = a file in the mesh's state folder
    store_url: str = ""
    #: names that callers use → served names, such as "@cf/moonshotai/kimi-k2.5": kimi
    aliases: dict[str, str] = Field(default_factory=dict)
    #: YAML file with prices of own models
    prices: Path | None = None
    tokenizers: Annotated[int, Field(ge=1, le=16)] = 1
    routers: Annotated[int, Field(ge=1, le=16)] = 1
    gateways: Annotated[int, Field(ge=1, le=16)] = 1
    models: Annotated[list[ModelTopology], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Topology:
        names = [one.served_name for one in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two models are named {twice[0]!r}; set `name`")
        return self


def load(path: Path) -> Topology:
    """Read a topology file (YAML). Raises BadInput that names the field."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"no topology file at {path}", field="topology") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {error}", field="topology") from error
    return parse(raw if raw is not None else {}, source=str(path))


def parse(raw: Any, *, source: str = "topology") -> Topology:
    """Validate a topology. Raises BadInput that names the field."""
    try:
        return Topology.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "topology"
        raise BadInput(f"{source}: {where}: {first['msg']}", field=where) from None

"""From a topology to processes: a pure function, so that `meshfire up`, Tilt and tests start the same mesh."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshfire.cluster.topology import ModelTopology, Topology

#: Services in the order in which they may be stopped: who asks before who answers.
STOP_ORDER = ("gateway", "router", "decode", "prefill", "expert_shard", "tokenizer")


@dataclass(frozen=True)
class ResolvedModel:
    """A model of the topology with what had to be looked up."""

    topology: ModelTopology
    directory: Path
    #: expert shards and dense slices after defaults
    expert_shards: int
    dense_slices: int


@dataclass(frozen=True)
class ProcessSpec:
    """One process: `python -m services.<service>` with settings in its environment."""

    name: str
    service: str
    #: host:port of its gRPC server; health is asked there
    address: str
    env: Mapping[str, str]
    #: names of processes that should be up first (a hint for displays: services wait for their peers themselves)
    depends_on: Sequence[str]
    #: host:port of its HTTP server, gateways only
    http_address: str = ""
    #: served model, workers only
    model: str = ""

    @property
    def prefix(self) -> str:
        """Of its settings' variables."""
        return f"MESHFIRE_{self.service.upper()}_"

    @property
    def command(self) -> list[str]:
        """What to run, from the repository's root."""
        return [sys.executable, "-m", f"services.{self.service}"]


@dataclass(frozen=True)
class Wiring:
    """What all processes of a mesh share."""

    registry_url: str
    otlp_endpoint: str
    #: empty = nothing is recorded, nobody has a key
    store_url: str = ""
    host: str = "127.0.0.1"


def shard_ids(topology: Topology, models: Sequence[ResolvedModel], index: int) -> list[str]:
    """Names of the expert shards of the model at `index`: expert-0, expert-1, … counted over all models."""
    first = sum(one.expert_shards for one in models[:index])
    return [f"expert-{first + number}" for number in range(models[index].expert_shards)]


def plan(
    topology: Topology, models: Sequence[ResolvedModel], wiring: Wiring, next_port: Callable[[], int]
) -> list[ProcessSpec]:
    """All processes of the mesh. `next_port` gives a port for each server."""
    builder = _Builder(topology, wiring, next_port)
    tokenizers = [builder.tokenizer(number, models) for number in range(topology.tokenizers)]
    routers = [builder.router(number, tokenizers) for number in range(topology.routers)]
    workers: list[ProcessSpec] = []
    counts = {"prefill": 0, "decode": 0}
    for index, model in enumerate(models):
        shards = [builder.shard(shard_id, model) for shard_id in shard_ids(topology, models, index)]
        workers += shards
        for role, wanted in (("prefill", model.topology.prefill), ("decode", model.topology.decode)):
            for _ in range(wanted):
                workers.append(builder.worker(role, counts[role], model, [one.name for one in shards]))
                counts[role] += 1
    gateways = [builder.gateway(number, routers, workers) for number in range(topology.gateways)]
    return [*tokenizers, *routers, *workers, *gateways]


@dataclass(frozen=True)
class _Builder:
    topology: Topology
    wiring: Wiring
    next_port: Callable[[], int]

    def tokenizer(self, number: int, models: Sequence[ResolvedModel]) -> ProcessSpec:
        served = {one.topology.served_name: str(one.directory) for one in models}
        return self._spec("tokenizer", f"tokenizer-{number}", {"MODELS": json.dumps(served)}, [])

    def router(self, number: int, tokenizers: Sequence[ProcessSpec]) -> ProcessSpec:
        without_prefill = [one.served_name for one in self.topology.models if not one.prefill]
        env = {
            "STORE_URL": self.wiring.store_url,
            "LOCAL_PREFILL_MAX_TOKENS": str(self.topology.local_prefill_max_tokens),
            "MODELS_WITHOUT_PREFILL": json.dumps(without_prefill),
        }
        if self.topology.prices is not None:
            env["PRICES"] = str(self.topology.prices)
        return self._spec("router", f"router-{number}", env, [one.name for one in tokenizers])

    def shard(self, shard_id: str, model: ResolvedModel) -> ProcessSpec:
        return self._spec(
            "expert_shard", shard_id, {**_model_env(model), "SHARD_ID": shard_id}, [], model.topology.served_name
        )

    def worker(self, role: str, number: int, model: ResolvedModel, shards: list[str]) -> ProcessSpec:
        env = {
            **_model_env(model),
            "EXPERTS": "mesh" if model.expert_shards else "local",
            "TENSOR_PARALLEL": str(model.topology.tensor_parallel),
        }
        if role == "decode":
            env["SPECULATION"] = model.topology.speculation
        return self._spec(role, f"{role}-{number}", env, shards, model.topology.served_name)

    def gateway(self, number: int, routers: Sequence[ProcessSpec], workers: Sequence[ProcessSpec]) -> ProcessSpec:
        port = self.topology.http_port if number == 0 and self.topology.http_port else self.next_port()
        env = {
            "HTTP_HOST": self.wiring.host,
            "HTTP_PORT": str(port),
            "STORE_URL": self.wiring.store_url,
            "KEYS": "true" if self.topology.keys else "false",
        }
        if self.topology.aliases:
            env["MODEL_ALIASES"] = json.dumps(self.topology.aliases)
        names = [one.name for one in (*routers, *workers)]
        return self._spec("gateway", f"gateway-{number}", env, names, http_address=f"{self.wiring.host}:{port}")

    def _spec(
        self,
        service: str,
        name: str,
        own: Mapping[str, str],
        depends_on: list[str],
        model: str = "",
        http_address: str = "",
    ) -> ProcessSpec:
        port = self.next_port()
        common = {
            "INSTANCE_ID": name,
            "HOST": self.wiring.host,
            "PORT": str(port),
            "REGISTRY_URL": self.wiring.registry_url,
            "OTLP_ENDPOINT": self.wiring.otlp_endpoint,
            "TEST_HOOKS": "true" if self.topology.test_hooks else "false",
        }
        address = f"{self.wiring.host}:{port}"
        spec = ProcessSpec(name, service, address, {}, depends_on, http_address, model)
        env = {spec.prefix + key: value for key, value in {**common, **own}.items()}
        return replace(spec, env=env | _THREADS)


#: Several processes share few cores: a spinning thread pool in each would cost milliseconds per operator.
_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def _model_env(model: ResolvedModel) -> dict[str, str]:
    return {
        "MODEL": model.topology.served_name,
        "MODEL_DIR": str(model.directory),
        "DENSE_SLICES": str(model.dense_slices),
        "COMPUTE": model.topology.compute,
        "NUM_THREADS": str(model.topology.num_threads),
    }

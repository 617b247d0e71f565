"""Every span, attribute and metric name that Meshfire emits; nowhere else may one be spelt.

Owns names only: no SDK, no service. A name enters this file (and the table of docs/telemetry.md, which a test compares)
before the code may use it. `SPAN_` constants name spans, `ATTR_` attributes of spans and metrics, `EVENT_` events of
spans, `METRIC_` instruments. Suffixes of attributes are units; a bare noun is a count.
"""

from __future__ import annotations

from typing import Final

# --- resource and instrumentation scope -------------------------------------------------------------------------------
ATTR_SERVICE_NAME: Final = "service.name"
ATTR_SERVICE_INSTANCE_ID: Final = "service.instance.id"
SCOPE: Final = "meshfire"

# --- every service ----------------------------------------------------------------------------------------------------
ATTR_REQUEST_ID: Final = "meshfire.request.id"
ATTR_MODEL: Final = "meshfire.model"
ATTR_MODEL_REVISION: Final = "meshfire.model.revision"
ATTR_EPOCH: Final = "meshfire.epoch"
ATTR_WORKER_ID: Final = "meshfire.worker.id"
ATTR_WORKER_ROLE: Final = "meshfire.worker.role"
ATTR_ERROR_REASON: Final = "meshfire.error.reason"
ATTR_TOKENS_PROMPT: Final = "meshfire.tokens.prompt"
ATTR_TOKENS_CACHED: Final = "meshfire.tokens.cached"
ATTR_TOKENS_CACHED_EXPECTED: Final = "meshfire.tokens.cached_expected"
ATTR_PLACEMENT: Final = "meshfire.placement"
ATTR_TOKENS_OUTPUT: Final = "meshfire.tokens.output"
ATTR_TOKENS_REASONING: Final = "meshfire.tokens.reasoning"
ATTR_TOKENS_BILLED_PROMPT: Final = "meshfire.tokens.billed_prompt"
ATTR_TOKENS_BILLED_CACHED: Final = "meshfire.tokens.billed_cached"
ATTR_MICRO_NEURONS: Final = "meshfire.micro_neurons"
ATTR_ACCOUNT_ID: Final = "meshfire.account.id"
ATTR_FINISH_REASON: Final = "meshfire.finish_reason"
ATTR_PRIORITY: Final = "meshfire.priority"
ATTR_QUEUE_WAIT_MS: Final = "meshfire.queue.wait_ms"
ATTR_QUEUE_POSITION: Final = "meshfire.queue.position"
ATTR_QUEUE_PREDICTED_MS: Final = "meshfire.queue.predicted_wait_ms"
ATTR_RPC_METHOD: Final = "rpc.method"

# --- gateway ----------------------------------------------------------------------------------------------------------
SPAN_GATEWAY_REQUEST: Final = "gateway.request"
ATTR_HTTP_METHOD: Final = "http.request.method"
ATTR_HTTP_ROUTE: Final = "http.route"
ATTR_HTTP_STATUS: Final = "http.response.status_code"
ATTR_STREAM: Final = "meshfire.stream"
METRIC_HTTP_DURATION: Final = "http.server.request.duration"
METRIC_HTTP_ACTIVE: Final = "http.server.active_requests"

# --- router -----------------------------------------------------------------------------------------------------------
SPAN_ROUTER_GENERATE: Final = "router.generate"
SPAN_ROUTER_TOKENIZE: Final = "router.tokenize"
SPAN_ROUTER_QUEUE_PREFILL: Final = "router.queue.prefill"
SPAN_ROUTER_QUEUE_DECODE: Final = "router.queue.decode"
ATTR_ATTEMPT: Final = "meshfire.attempt"
ATTR_GEN_AI_MODEL: Final = "gen_ai.request.model"
EVENT_FAILOVER: Final = "meshfire.failover"
METRIC_TTFT: Final = "gen_ai.server.time_to_first_token"
METRIC_TPOT: Final = "gen_ai.server.time_per_output_token"
METRIC_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
METRIC_ROUTER_ACTIVE: Final = "meshfire.router.requests.active"
METRIC_ROUTER_QUEUED: Final = "meshfire.router.requests.queued"
METRIC_ROUTER_QUEUE_WAIT: Final = "meshfire.router.queue.wait"
METRIC_ROUTER_PREDICTED_WAIT: Final = "meshfire.router.queue.predicted_wait"
METRIC_ROUTER_WAIT_RATIO: Final = "meshfire.router.queue.wait_ratio"
METRIC_ROUTER_FAILOVERS: Final = "meshfire.router.failovers"
METRIC_ROUTER_REFUSED: Final = "meshfire.router.requests.refused"
METRIC_ROUTER_TOKENS_PROMPT: Final = "meshfire.router.tokens.prompt"
METRIC_ROUTER_TOKENS_OUTPUT: Final = "meshfire.router.tokens.output"

# --- tokenizer --------------------------------------------------------------------------------------------------------
SPAN_TOKENIZER_TOKENIZE: Final = "tokenizer.tokenize"
SPAN_TOKENIZER_DETOKENIZE: Final = "tokenizer.detokenize"
ATTR_MESSAGES: Final = "meshfire.messages"
METRIC_TOKENIZER_TOKENS: Final = "meshfire.tokenizer.tokens"

# --- prefill ----------------------------------------------------------------------------------------------------------
SPAN_PREFILL_LEASE: Final = "prefill.lease"
SPAN_PREFILL_CHUNK: Final = "prefill.chunk"
SPAN_PREFILL_READ_KV: Final = "prefill.read_kv"
ATTR_CHUNK_TOKENS: Final = "meshfire.chunk.tokens"
ATTR_CHUNK_START: Final = "meshfire.chunk.start"
ATTR_COMPUTE_MS: Final = "meshfire.compute_ms"
ATTR_KV_BYTES: Final = "meshfire.kv.bytes"
ATTR_KV_BLOCKS: Final = "meshfire.kv.blocks"
ATTR_KV_BLOCKS_REUSED: Final = "meshfire.kv.blocks.reused"
ATTR_KV_JOIN_WAIT_MS: Final = "meshfire.kv.join.wait_ms"
ATTR_KV_LEASE_ID: Final = "meshfire.kv.lease.id"
METRIC_PREFILL_TOKENS: Final = "meshfire.prefill.tokens"
METRIC_PREFILL_TOKENS_CACHED: Final = "meshfire.prefill.tokens.cached"
METRIC_PREFILL_CHUNK_DURATION: Final = "meshfire.prefill.chunk.duration"
METRIC_KV_BLOCKS_FREE: Final = "meshfire.kv.blocks.free"
METRIC_KV_BLOCKS_TOTAL: Final = "meshfire.kv.blocks.total"
METRIC_KV_BYTES_SENT: Final = "meshfire.kv.bytes.sent"
METRIC_KV_LEASES: Final = "meshfire.kv.leases"

# --- decode -----------------------------------------------------------------------------------------------------------
SPAN_DECODE_LEASE: Final = "decode.lease"
SPAN_DECODE_READ_KV: Final = "decode.read_kv"
SPAN_DECODE_STEPS: Final = "decode.steps"
ATTR_STEPS: Final = "meshfire.steps"
ATTR_PREEMPTIONS: Final = "meshfire.preemptions"
ATTR_BATCH_MEAN: Final = "meshfire.batch.mean"
METRIC_DECODE_TOKENS: Final = "meshfire.decode.tokens"
METRIC_DECODE_STEP_DURATION: Final = "meshfire.decode.step.duration"
METRIC_DECODE_BATCH: Final = "meshfire.decode.batch"
METRIC_DECODE_PREEMPTIONS: Final = "meshfire.decode.preemptions"
METRIC_DECODE_PROMPT_TOKENS: Final = "meshfire.decode.prompt.tokens"
METRIC_DECODE_DRAFTED: Final = "meshfire.decode.drafted"
METRIC_DECODE_ACCEPTED: Final = "meshfire.decode.accepted"
METRIC_DECODE_RUNNING: Final = "meshfire.decode.running"
METRIC_DECODE_WAITING: Final = "meshfire.decode.waiting"
METRIC_KV_BYTES_READ: Final = "meshfire.kv.bytes.read"

# --- expert shard, both ends of the hop -------------------------------------------------------------------------------
SPAN_EXPERT_FORWARD: Final = "expert_shard.forward"
EVENT_EXPERT_SHARD: Final = "meshfire.expert.shard"
ATTR_SHARD_ID: Final = "meshfire.shard.id"
ATTR_EXPERT_HOPS: Final = "meshfire.expert.hops"
ATTR_EXPERT_TOKENS: Final = "meshfire.expert.tokens"
ATTR_EXPERT_BYTES_IN: Final = "meshfire.expert.bytes_in"
ATTR_EXPERT_BYTES_OUT: Final = "meshfire.expert.bytes_out"
ATTR_EXPERT_WAIT_MS: Final = "meshfire.expert.wait_ms"
ATTR_EXPERT_QUEUE_MS: Final = "meshfire.expert.queue_ms"
ATTR_EXPERT_COMPUTE_MS: Final = "meshfire.expert.compute_ms"
ATTR_CALLER_ID: Final = "meshfire.caller.id"
METRIC_EXPERT_HOPS: Final = "meshfire.expert.hops"
METRIC_EXPERT_TOKENS: Final = "meshfire.expert.tokens"
METRIC_EXPERT_COMPUTE: Final = "meshfire.expert.compute"
METRIC_EXPERT_QUEUE: Final = "meshfire.expert.queue"
METRIC_EXPERT_BYTES_RECEIVED: Final = "meshfire.expert.bytes.received"
METRIC_EXPERT_BYTES_SENT: Final = "meshfire.expert.bytes.sent"
METRIC_EXPERT_HOP_WAIT: Final = "meshfire.expert.hop.wait"


def names_of(prefix: str) -> dict[str, str]:
    """Constant name → value of every name whose constant starts with `prefix`, in file order."""
    return {key: value for key, value in globals().items() if key.startswith(prefix) and isinstance(value, str)}

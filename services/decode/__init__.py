"""KV to tokens: continuous batching, paged KV, sampling. Pulls leases from the routers."""

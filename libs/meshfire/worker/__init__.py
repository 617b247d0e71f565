"""What prefill and decode workers share: the link to routers, the mesh of expert shards, rehearsed faults.

Owns the worker's side of WorkService and of expert hops. Knows neither the prompt pass nor the batch of decode.
"""

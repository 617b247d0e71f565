"""The router: the public gRPC API, and the work that prefill and decode workers pull from it."""

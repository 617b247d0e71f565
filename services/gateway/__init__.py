"""The REST bridge: HTTP in, `InferenceService` out. Wire formats live here; tokens, models and queues do not."""

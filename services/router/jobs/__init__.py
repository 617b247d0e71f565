"""Asynchronous jobs: taken over gRPC, kept in the store, run on idle credit, told of by events."""

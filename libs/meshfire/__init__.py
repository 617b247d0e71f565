"""Meshfire: a self-hosted Workers AI for large open models, as a mesh of gRPC services."""

__version__ = "0.1.0"

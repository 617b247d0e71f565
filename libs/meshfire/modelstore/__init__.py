"""Models on this machine: getting them, keeping them whole, finding them. Loads none and serves none."""

from meshfire.modelstore.store import CachedModel, list_models, pull, remove, resolve

__all__ = ["CachedModel", "list_models", "pull", "remove", "resolve"]

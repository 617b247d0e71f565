"""Who serves what, where, and the small documents all share. `base` is the port; Consul, a file or memory fill it.

Knows nothing of what services do with an address. Imports neither `rpc` nor `runtime`.
"""

from meshfire.discovery.base import Instance, KvEntry, Registry, open_registry

__all__ = ["Instance", "KvEntry", "Registry", "open_registry"]

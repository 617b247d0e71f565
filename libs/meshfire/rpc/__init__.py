"""gRPC as Meshfire uses it: channels, error mapping, tensors and geometry on the wire. Knows no service."""

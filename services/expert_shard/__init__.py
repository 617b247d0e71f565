"""The FFNs of a set of (layer, expert) pairs. Knows nothing of tokens, sequences, attention or who asks."""

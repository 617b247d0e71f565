"""Text ⇄ tokens for the mesh: the only service between gateway and client that sees text. Holds no weights."""

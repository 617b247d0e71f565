"""A whole mesh on one machine: topology file → processes → supervision. Knows how services start, not what they do."""

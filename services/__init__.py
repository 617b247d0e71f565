"""One folder per deployable: `ls services/` is the mesh. Started with `python -m services.<name>` from the root."""

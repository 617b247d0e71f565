"""Prompt → KV. Owns the prompt pass, the prefix cache and offered KV; knows nothing of text, sampling or HTTP."""

"""Kimi K2.5's chat language: tool declarations, the chat template, tool-call ids, and what its output means."""

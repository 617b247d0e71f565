"""Structured output: rules for what a model may write, compiled to masks over its vocabulary."""

"""The configuration: typed schema, defaults, loading, and preflight checks.

This package imports no torch, transformers or pyarrow, so `strop --help` and `strop check` answer at once.
This file imports nothing: the scoring process loads `reward_parts` without pydantic.
"""

"""The configuration: typed schema, defaults, loading, and preflight checks.

It imports no torch, transformers or pyarrow: `strop --help` and `strop check --config-only` start at once.
This file imports nothing: the scoring process loads `reward_parts` without pydantic.
"""

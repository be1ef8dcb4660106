"""The configuration: typed schema, defaults, loading, and the checks that run before a model is loaded.

This package does not import torch, transformers or pyarrow, so that `strop --help` and `strop check` answer
at once. It imports nothing itself: the scoring process loads `reward_parts` without pydantic.
"""

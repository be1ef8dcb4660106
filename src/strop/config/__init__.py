"""The configuration: typed schema, defaults, loading, and the checks that run before a model is loaded.

Nothing here imports torch, transformers or pyarrow: `strop --help` and `strop check` answer at once.
"""

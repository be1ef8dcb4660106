"""Data: downloads, parquet rows, token ids, samplers and batches.

Empty, so that ``strop.data.prompt_table`` and ``strop.prepare`` need no torch.
"""

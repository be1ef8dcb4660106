"""Data: downloads, parquet rows, token ids, samplers and batches.

Empty, so that ``strop.data.parquet`` and ``strop.prepare`` need no torch.
"""

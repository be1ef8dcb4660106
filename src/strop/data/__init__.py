"""Data: files, parquet rows, token ids, samplers and batches.

Nothing is imported here, so that ``strop.data.parquet`` and ``strop.prepare`` stay free of torch.
"""

"""Keys under `data` of every kind of run: the files, and how long their rows may be."""

from __future__ import annotations

from strop.config.schema.base import Names, PositiveInt, Section


class RowsConfig(Section):
    """Rows for training and validation."""

    tokenizer: str | None
    """Tokenizer folder or name; null: the model's own."""
    train_files: Names
    """Training parquet file, or a list of them: local paths, hdfs:// or any fsspec URL."""
    val_files: Names
    """Validation parquet file, or a list of them."""
    prompt_key: str
    """Column that holds the prompt: a list of chat messages, or a plain string."""
    train_batch_size: PositiveInt
    """Rows an iteration, over all processes."""
    val_batch_size: PositiveInt
    """Rows that validation takes at once; it never changes a result."""
    max_prompt_length: PositiveInt
    """Longest prompt in tokens; shorter ones are padded on the left to it."""
    max_response_length: PositiveInt
    """Longest response in tokens, its end token among them."""
    shuffle: bool
    """Visit the training rows in a new seeded order every epoch; False: in the order of the files."""
    num_workers: PositiveInt | None
    """Processes that tokenise the files; null: one for each core."""
    cache_dir: str
    """Folder for tokenised files and for files fetched from a URL; models from the hub go into HF_HOME."""

"""Keys under `data` that only reinforcement learning has: the prompts and how many are taken at a time."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import Names, PositiveInt, Section

# Keys under `data` of every kind of run: the files, and how long their rows may be.


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


class DataConfig(RowsConfig):
    """Prompts for training and validation."""

    tokenizer: str | None
    """Tokenizer folder or name; null: the one of actor_rollout_ref.model.path."""
    reward_fn_key: str
    """Column that names the scorer of a row (its data source)."""
    train_batch_size: PositiveInt
    """Prompts an iteration; each is answered actor_rollout_ref.rollout.n times."""
    val_batch_size: PositiveInt
    """Prompts that validation generates at once; it never changes a result."""
    val_max_samples: PositiveInt | None
    """Validate on this many prompts of each data source, its first ones; null: on all."""
    return_raw_input_ids: bool
    """Also hand on the prompt's ids without the chat template, for a reward model with another template."""
    return_raw_chat: bool
    """Also hand on the prompt's chat messages as they stand in the file."""
    truncation: Literal["error", "left", "right", "middle"]
    """What to do with a prompt over max_prompt_length that was not filtered: stop, or cut it there."""
    filter_overlong_prompts: bool
    """Drop prompts over max_prompt_length when the files are read, and say how many."""

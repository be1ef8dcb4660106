"""Keys under `data`: the prompts, how long they may be and how many are taken at a time."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import Names, PositiveInt, Section


class DataConfig(Section):
    """Prompts for training and validation."""

    tokenizer: str | None
    """Tokenizer folder or name; null: the one of actor_rollout_ref.model.path."""
    train_files: Names
    """Training parquet file, or a list of them: local paths, hdfs:// or any fsspec URL."""
    val_files: Names
    """Validation parquet file, or a list of them."""
    prompt_key: str
    """Column that holds the prompt: a list of chat messages, or a plain string."""
    reward_fn_key: str
    """Column that names the scorer of a row (its data source)."""
    max_prompt_length: PositiveInt
    """Longest prompt in tokens; shorter ones are padded on the left to it."""
    max_response_length: PositiveInt
    """Longest response in tokens; generation stops there."""
    train_batch_size: PositiveInt
    """Prompts an iteration; each is answered actor_rollout_ref.rollout.n times."""
    val_batch_size: PositiveInt
    """Prompts that validation generates at once; it never changes a result."""
    return_raw_input_ids: bool
    """Also hand on the prompt's ids without the chat template, for a reward model with another template."""
    return_raw_chat: bool
    """Also hand on the prompt's chat messages as they stand in the file."""
    truncation: Literal["error", "left", "right", "middle"]
    """What to do with a prompt over max_prompt_length that was not filtered: stop, or cut it there."""
    filter_overlong_prompts: bool
    """Drop prompts over max_prompt_length when the files are read, and say how many."""
    shuffle: bool
    """Visit the training prompts in a new seeded order every epoch; False: in the order of the files."""
    num_workers: PositiveInt | None
    """Processes that tokenise the files; null: one for each core."""
    cache_dir: str
    """Folder for tokenised files and for files fetched from a URL."""

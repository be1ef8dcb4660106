"""Keys under `data`: the files of any kind of run, and the prompts of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Literal

from strop.config.schema.base import Names, PositiveInt, Processes, Required, Section, Text

PROMPT_FILE = "parquet files (strop prepare writes them)"


class RowsConfig(Section):
    """Rows for training and validation."""

    tokenizer: str | None
    """Tokenizer folder or name; null: the one of the model that is trained."""
    train_files: Annotated[
        Names,
        Required(
            PROMPT_FILE,
            "data/train.parquet",
            applies=lambda at: not at.config.trainer.val_only,
            when="unless trainer.val_only",
        ),
    ]
    """Training parquet file, or a list of them: local paths, hdfs:// or any fsspec URL."""
    val_files: Annotated[
        Names,
        Required(
            PROMPT_FILE,
            "data/test.parquet",
            applies=lambda at: at.config.trainer.val_only,
            when="with trainer.val_only",
        ),
    ]
    """Validation parquet file, or a list of them; [] trains without validation."""
    prompt_key: Text
    """Column that holds the prompt: a list of chat messages, or a plain string."""
    train_batch_size: PositiveInt
    """Rows per iteration, over all processes."""
    val_batch_size: PositiveInt
    """Rows in one batch of validation; it never changes a result."""
    max_prompt_length: PositiveInt
    """Longest prompt in tokens; shorter ones are padded on the left to it."""
    max_response_length: PositiveInt
    """Longest response in tokens, its end token among them."""
    shuffle: bool
    """Visit the training rows in a new seeded order every epoch; False: in the order of the files."""
    num_workers: Processes | None
    """Processes that tokenise the files; null: one for each core."""
    cache_dir: str
    """Folder for tokenised files and for files fetched from a URL; models from the hub go into HF_HOME."""


class DataConfig(RowsConfig):
    """Prompts for training and validation."""

    # Required also for a run that never validates: the validation loader is always built.
    val_files: Annotated[Names, Required(PROMPT_FILE, "data/test.parquet")]
    """Validation parquet file, or a list of them."""
    reward_fn_key: Text
    """Column that names the scorer of a row (its data source)."""
    train_batch_size: PositiveInt
    """Prompts per iteration; each is answered actor_rollout_ref.rollout.n times."""
    val_max_samples: PositiveInt | None
    """Validate on this many prompts of each data source, its first ones; null: on all."""
    return_raw_input_ids: bool
    """Also put the prompt's ids without the chat template into the batch."""
    return_raw_chat: bool
    """Also put the prompt's chat messages, as in the file, into the batch."""
    truncation: Literal["error", "left", "right", "middle"]
    """Treatment of a prompt over max_prompt_length that was not filtered: stop, or cut it on that side."""
    filter_overlong_prompts: bool
    """Drop prompts over max_prompt_length when the files are read, and log how many."""

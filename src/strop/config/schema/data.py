"""Keys under `data` that only reinforcement learning has: the prompts and how many are taken at a time."""

from __future__ import annotations

from typing import Literal

from strop.config.schema.base import PositiveInt
from strop.config.schema.rows import RowsConfig


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

"""The trainer of the reference documents: loaders, worker groups, and the loop around PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.config.schema import Config
from strop.data.loader import PromptLoader, train_loader, validation_loader
from strop.data.rl_dataset import FirstOfEachSource, create_rl_dataset
from strop.errors import Attempts

if TYPE_CHECKING:
    pass


def build_loaders(
    config: Config, tokenizer: Any, train_dataset: Any | None, val_dataset: Any | None
) -> tuple[PromptLoader | Any, PromptLoader]:
    """The endless seeded loader of training prompts and the one-pass loader of validation prompts.

    The first is None with ``trainer.val_only``, and the training files are left alone.
    """
    data = config.data
    if config.reward_model.enable and config.reward_model.model.input_tokenizer is not None:
        # The reward model writes the conversation anew with its own template, so it needs the messages.
        data = data.model_copy(update={"return_raw_chat": True})
    pad_token_id, longest = tokenizer.pad_token_id, data.max_prompt_length
    train, attempt = None, Attempts()
    if not config.trainer.val_only and train_dataset is None:
        train_dataset = attempt(lambda: create_rl_dataset(data.train_files, data, tokenizer))
    if val_dataset is None:
        val_dataset = attempt(lambda: create_rl_dataset(data.val_files, data, tokenizer))
    attempt.raise_errors()
    if train_dataset is not None and not config.trainer.val_only:
        train = train_loader(
            train_dataset,
            batch_size=data.train_batch_size,
            seed=config.trainer.seed,
            shuffle=data.shuffle,
            pad_token_id=pad_token_id,
            max_prompt_length=longest,
        )
    if data.val_max_samples is not None:
        val_dataset = FirstOfEachSource(val_dataset, data.val_max_samples)
    validation = validation_loader(
        val_dataset, batch_size=data.val_batch_size, pad_token_id=pad_token_id, max_prompt_length=longest
    )
    return train, validation


def total_training_steps(config: Config, steps_per_epoch: int) -> int:
    """Exactly that many iterations run."""
    return config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs

"""Loaders of prompts, as a configuration describes them or with parts that a program passes."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from strop.config.schema import Config
from strop.data.hub import local_tokenizer
from strop.data.loader import EpochSampler, PromptLoader, SampledBatches, collate, lacks_for_resume, one_pass
from strop.data.rl_dataset import create_rl_dataset, first_of_each_source, log_prompts, pictures_digest
from strop.data.sources import Rows, sources
from strop.errors import Attempts, ConfigError, DataError
from strop.protocol import DataProto

logger = logging.getLogger("strop.data")


def build_loaders(
    config: Config,
    tokenizer: Any,
    train_dataset: Any | None,
    val_dataset: Any | None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    train_sampler: Any | None = None,
    rows: Sequence[Rows] = (),
    tools_of: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
) -> tuple[PromptLoader | Any, PromptLoader | Any]:
    """Return the endless loader of training prompts and the loader of validation prompts.

    The first is None with ``trainer.val_only``, and the training files are not read. The second is None
    without ``data.val_files``. ``tools_of`` returns the tools of a row's environment.
    """
    data = config.data
    if config.reward_model.enable and config.reward_model.model.input_tokenizer is not None:
        # The reward model applies its own chat template, so it needs the messages.
        data = data.model_copy(update={"return_raw_chat": True})
    # data.tokenizer, for example an adapter's folder, may have a tokenizer alone
    model = config.actor_rollout_ref.model.path
    folder = local_tokenizer(model, data.cache_dir) if data.tokenizer else None
    create = partial(
        create_rl_dataset, data_config=data, tokenizer=tokenizer, processor=folder, tools_of=tools_of
    )
    pad = partial(collate, pad_token_id=tokenizer.pad_token_id, max_prompt_length=data.max_prompt_length)
    if collate_fn is not None:
        pad = partial(as_batch, collate_fn)
    train, attempt = None, Attempts()
    if train_sampler is not None:
        _require_usable(train_sampler, config)
    if not config.trainer.val_only and train_dataset is None:
        train_dataset = attempt(lambda: create(sources(data.train_files, rows)))
    if val_dataset is None and data.val_files:
        val_dataset = attempt(lambda: create(sources(data.val_files, rows)))
    attempt.raise_errors()
    log_prompts(train_dataset, val_dataset)
    if train_dataset is not None and not config.trainer.val_only:
        batches: Any
        if train_sampler is None:
            batches = EpochSampler(
                len(train_dataset),
                data.train_batch_size,
                config.trainer.seed,
                data.shuffle,
                pictures=pictures_digest(train_dataset),
            )
        else:
            batches = SampledBatches(train_sampler, data.train_batch_size)
        train = PromptLoader(train_dataset, batches, pad)
    if val_dataset is None:
        return train, None
    if data.val_max_samples is not None:
        val_dataset = first_of_each_source(val_dataset, data.val_max_samples, data.reward_fn_key)
    return train, PromptLoader(val_dataset, one_pass(len(val_dataset), data.val_batch_size), pad)


def _require_usable(sampler: Any, config: Config) -> None:
    """Raise ``ConfigError`` for a sampler whose order the run cannot continue, or needs in advance."""
    kind, save_freq = type(sampler).__name__, config.trainer.save_freq
    if missing := lacks_for_resume(sampler):
        text = f"train_sampler={kind} has no {' and no '.join(missing)}"
        if save_freq > 0:
            raise ConfigError(
                f"{text}, so a resume would train on other rows (trainer.save_freq={save_freq}): add the "
                "methods, or set trainer.save_freq=-1"
            )
        logger.info("%s: the run saves no checkpoint by time, nor when it is stopped", text)
    else:
        _require_readable(sampler)
    ahead = {
        "trainer.async_steps": config.trainer.async_steps,
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
    }
    if given := [f"{key}={value}" for key, value in ahead.items() if value]:
        raise ConfigError(
            f"train_sampler={kind} with {' and '.join(given)}: batches are generated ahead there, and only "
            "the order of strop's own sampler is known ahead; leave one of them out"
        )


def _require_readable(sampler: Any) -> None:
    """Raise ``ConfigError`` for a state that a checkpoint cannot give back: it is read as plain values."""
    state, file = sampler.state_dict(), io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"train_sampler={type(sampler).__name__}: its state_dict() must return tensors and plain values, "
            f"as int, str, list and dict, and no arrays of numpy, or no resume can read it ({error})"
        ) from error


def as_batch(collate_fn: Callable[[list[Any]], Any], rows: list[Any]) -> DataProto:
    """Return what a user's ``collate_fn`` makes of rows: a ``DataProto``, or a mapping of columns.

    Raises :class:`DataError` for anything else.
    """
    found = collate_fn(rows)
    if not isinstance(found, DataProto | Mapping):
        raise DataError(
            f"collate_fn returned {type(found).__name__}, expected a DataProto or a mapping of columns"
        )
    return DataProto.from_single_dict(found)

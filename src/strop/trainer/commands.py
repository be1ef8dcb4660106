"""Steps of a run, for the command line and for Python: check, train, restart after a worker's failure.

Configuration errors are raised before torch is imported.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from strop.config.checks.check import check
from strop.config.derived import RATES, UNKNOWN_SIZE, usual_rate
from strop.config.keys import value_at
from strop.config.placement import rollout_in_words
from strop.config.recipes import RECIPES
from strop.config.roles import sampler_in_words
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import SupervisedConfig
from strop.config.trees import Root
from strop.errors import Attempts, ConfigError, WorkerError, is_interrupt

if TYPE_CHECKING:
    from strop.data.outline import Outline
    from strop.data.sources import Rows
    from strop.trainer.loop import OnStep
    from strop.trainer.run_folder import RunFolder

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


_BATCH = "data.train_batch_size"
_MINI_BATCHES = ("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
_SMALL_BATCH = 32
_WARM_UPS = ("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.critic_warmup")


class Loaded(NamedTuple, Generic[Root]):
    """A configuration, what is known of its data files, and a line about its batch size, or ""."""

    config: Root
    data: Outline
    batch_in_words: str


def fitted(load: Callable[[Mapping[str, Any]], Root], rows: Sequence[Rows] = ()) -> Loaded[Root]:
    """Load a configuration; a default batch size above the number of training rows becomes one they fill.

    Warm-ups of a shipped recipe are at most a quarter of the run; rates know sizes of models on the hub, too.
    ``load`` takes values of keys that the user does not set. ``rows``: data in memory.
    """
    from strop.data.outline import outline  # pyarrow

    config, found, words = load({}), dict[str, Any](), ""
    data, size = outline(config, rows), config.data.train_batch_size
    if data.train_rows is not None and data.train_rows < size:
        written = [key for key in _MINI_BATCHES if key in (config.written or ())]
        step = math.lcm(*(value_at(config, key) for key in written))
        rows_used = min(data.train_rows, max(_SMALL_BATCH, step))
        found[_BATCH] = rows_used - rows_used % step or rows_used
        config = load(found)
        if (now := config.data.train_batch_size) != size:  # else the user's own
            words = f"{_BATCH}={now}: the default of {size} is more than the {data.train_rows} training rows"
    epochs = (data.train_rows or 0) // config.data.train_batch_size * config.trainer.total_epochs
    of_recipe = [key for key in _WARM_UPS if config.author(key).removeprefix("recipe ") in RECIPES]
    if iterations := config.trainer.total_training_steps or epochs:
        found |= {key: min(value_at(config, key), iterations // 4) for key in of_recipe}
    found |= {key: -1 for key in of_recipe if f"{key}_ratio" in (config.written or ())}  # the user's
    unknown = [key for key in RATES if config.author(key).endswith(UNKNOWN_SIZE)]
    if models := {key: value_at(config, RATES[key][0]) for key in unknown}:
        from strop.data.hub import parameters_of

        sizes = {path: parameters_of(path) for path in {model.path for model in models.values()}}
        rates = {key: usual_rate(sizes[model.path], model) for key, model in models.items()}
        found |= {key: float(f"{rate:.0e}") if rate else value_at(config, key) for key, rate in rates.items()}
    return Loaded(load(found) if found else config, data, words)


def require_valid(config: RootConfig, rows: Sequence[Rows] = (), data: Outline | None = None) -> None:
    """Raise all errors of the configuration, and of the data that is here; the trainer logs the warnings.

    ``data``: what is known of it already.
    """
    from strop.data.outline import outline

    data, attempt = data or outline(config, rows), Attempts()
    attempt(check(config, train_rows=data.train_rows).raise_errors)
    attempt.errors += data.errors
    attempt.raise_errors()


def train(
    config: RootConfig,
    *,
    rows: Sequence[Rows] = (),
    data: Outline | None = None,
    on_step: OnStep | None = None,
) -> bool:
    """Check the configuration and train; see ``require_valid``, ``train_once`` and ``with_restarts``."""
    if on_step is not None:
        _require_on_step(on_step)
    require_valid(config, rows, data)
    logger.info("run folder: %s", config.trainer.default_local_dir)
    if isinstance(config, Config):
        logger.info("%s", rollout_in_words(config))
        if words := sampler_in_words(config):
            logger.info("%s", words)
        if not config.data.val_files:
            logger.info("no validation: data.val_files is not set")
    say_loading()
    return with_restarts(config, partial(train_once, rows=rows, on_step=on_step))


def _require_on_step(function: OnStep) -> None:
    """Raise ``ConfigError`` for a function that the first iteration could not call, or would not await."""
    from strop.rewards.arguments import is_async

    found: Any = repr(function)[:80]
    try:
        found = inspect.signature(function)
        found.bind(1, {})
    except ValueError:  # of a function in C without a signature
        return
    except TypeError as error:
        raise ConfigError(f"on_step: expected a function of (step, metrics), found {found}") from error
    if is_async(function):
        raise ConfigError("on_step: expected a function, found an async one, which no iteration awaits")


def build(
    config: RootConfig,
    *,
    with_weights: bool = True,
    rows: Sequence[Rows] = (),
) -> Any:
    """Return the trainer of the kind of run that the configuration describes; see ``build_trainer``."""
    if isinstance(config, Config):
        from strop.trainer.build import build_trainer  # torch and transformers: seconds

        return build_trainer(config, with_weights=with_weights, rows=rows)
    from strop.trainer import supervised

    assert isinstance(config, SupervisedConfig)
    kind = supervised.TRAINERS[type(config)]
    return supervised.build(kind, config, with_weights=with_weights, rows=rows)


def say_loading() -> None:
    """Log that torch is loaded, which takes seconds, unless it is."""
    if "torch" not in sys.modules:
        logger.info("loading torch")


def train_once(config: RootConfig, *, rows: Sequence[Rows] = (), on_step: OnStep | None = None) -> bool:
    """Build the trainer, train, and release its workers even if it raises.

    Return False if the trained model could not be uploaded (``trainer.push_to_hub``).

    ``rows`` in memory are read where ``data.train_files`` and ``data.val_files`` have their names.
    """
    trainer = build(config, rows=rows)
    try:
        if isinstance(config, Config):
            from strop.trainer.build import report_reward

            report_reward(trainer)
        logger.info("loading the model")
        trainer.init_workers()
        trainer.fit(on_step)
        return not trainer.upload_failed
    finally:
        trainer.shutdown()


def with_restarts(config: Root, train: Callable[[Root], Result]) -> Result:
    """Return ``train(config)``; after a worker's failure retry from the last checkpoint.

    ``trainer.max_restarts`` limits the retries. An error that strop itself raises (``WorkerError.is_final``)
    is not retried. A restart rebuilds models, data loaders and reward processes: only the run folder carries
    over, which makes a restart equal to a resume. The run folder is locked from the first attempt to the end;
    ``ConfigError`` if another process holds the lock.
    """
    from strop.trainer.run_folder import RunFolder, run_lock

    folder = RunFolder(config.trainer.default_local_dir)
    restarts_left = config.trainer.max_restarts
    with run_lock(folder.path), _naming_the_checkpoint(folder, config):
        while True:
            before = _manifests(folder.path)
            try:
                return train(config)
            except WorkerError as error:
                if error.is_final or not restarts_left:
                    raise
                logger.error("%s", error)
            after = folder.latest_checkpoint()
            # saved by this run, whatever resume_mode was, which may have made an earlier one the latest
            if after is not None and after[0] in _saved(folder.path, but=before):
                trainer = config.trainer.model_copy(update={"resume_mode": "auto"})
                config = config.model_copy(update={"trainer": trainer})
            mode = config.trainer.resume_mode
            logger.warning(
                "restarting from %s; %d restart%s left",
                f"iteration {after[0]}" if after and mode == "auto" else f"the start (resume_mode={mode})",
                restarts_left - 1,
                "" if restarts_left == 2 else "s",
            )
            restarts_left -= 1


def _manifests(folder: Path) -> set[tuple[Path, int]]:
    """Return the manifests of whole checkpoints in a run folder, with their times."""
    from strop.manifest import MANIFEST

    return {(file, file.stat().st_mtime_ns) for file in folder.glob(f"*/{MANIFEST}")}


def _saved(folder: Path, *, but: set[tuple[Path, int]]) -> set[str]:
    """Return the iterations of the checkpoints in a run folder without those of ``but``."""
    return {file.parent.name.rpartition("_")[2] for file, _ in _manifests(folder) - but}


@contextmanager
def _naming_the_checkpoint(folder: RunFolder, config: RootConfig) -> Generator[None]:
    """Add where the run stands as a note to what ends the body: an interrupt, an error of an iteration."""
    from strop.checkpoint.folder import iteration_of, name_of

    begun = _reached(folder)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        latest, step = folder.latest_checkpoint(), _reached(folder)
        auto = config.trainer.resume_mode == "auto"
        again = "the same command goes on" if auto else "trainer.resume_mode=auto goes on"
        if not is_interrupt(error):  # a library may replace an interrupt by its own error
            if step == begun:  # an error of the start, which says all
                raise
            saved = folder.path / name_of(int(latest[0] if latest else 0))
            again = f"trainer.resume_mode={saved} goes on, also with another reward or other data"
        if latest and latest[0] == str(step):
            error.add_note(f"stopped at step {step}, saved; {again}")
        elif latest:
            error.add_note(f"stopped after step {step}; saved is step {latest[0]}, from which {again}")
        elif iteration_of(folder.final_model) == step:  # while it drew curves, or uploaded
            error.add_note(f"stopped after step {step}, the last one; its model is {folder.final_model}")
        else:
            error.add_note(f"stopped after step {step}; nothing is saved")
        raise


def _reached(folder: RunFolder) -> int:
    """Return the last iteration that is logged or saved; one whose validation failed is only saved."""
    latest, _ = folder.latest_checkpoint() or ("", 0)
    return max(folder.last_logged_step(), int(latest) if latest.isdecimal() else 0)

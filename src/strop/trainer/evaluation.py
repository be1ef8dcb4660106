"""One validation of a model, with its samples and figures in a folder."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.checkpoint.folder import auto_class, holds_run, model_in
from strop.config.backends import ROLLOUTS
from strop.config.memory.facts import read_model_facts
from strop.config.paths import (
    RESULTS,
    SAMPLES,
    base_of_adapter,
    expand,
    is_adapter,
    is_url,
    may_be_a_hub_name,
    runs_near,
    similar_path,
)
from strop.config.roles import loads_policy
from strop.config.schema import Config
from strop.errors import ConfigError, TrainingError, write_failure
from strop.files import atomic_write_text
from strop.trainer.commands import require_valid, say_loading

if TYPE_CHECKING:
    from strop.data.sources import Rows
    from strop.tracking.report import ValidationReport

logger = logging.getLogger(__name__)

_PROMPT_LENGTH, _RESPONSE_LENGTH = 1024, 512
_CUSTOM = "custom_reward_function"


def evaluate(
    config: Config,
    *,
    rows: Sequence[Rows] = (),
) -> ValidationReport:
    """Validate with ``config``, which has ``trainer.val_only``, and write the results to its run folder.

    ``rows`` in memory are read where ``data.val_files`` has their names.

    The files are ``samples.parquet``, ``config.yaml`` and, last, ``results.json``. Raises as a run does,
    ``ConfigError`` if the folder holds a run or an evaluation or another one is writing it, and
    ``TrainingError`` if a file cannot be written.
    """
    out = Path(expand(config.trainer.default_local_dir))
    _require_free(out)
    require_valid(config, rows)
    _require_outside(config)
    say_loading()
    from strop.trainer.run_folder import RunFolder, run_lock

    with run_lock(RunFolder(out).path):
        _require_free(out)  # another one may have been started at the same time
        return _evaluated(config, rows, out)


def _require_free(out: Path) -> None:
    kind, found = ("an evaluation", RESULTS) if (out / RESULTS).exists() else ("a run", holds_run(out))
    was_killed = found == "config.yaml" and (out / SAMPLES).exists()  # an evaluation, before its last file
    if found is not None and not was_killed:
        raise ConfigError(
            f"trainer.default_local_dir={out}: it holds {kind} ({found}), and config.yaml there would be "
            "replaced; name another folder"
        )


def _evaluated(config: Config, rows: Sequence[Rows], out: Path) -> ValidationReport:
    from strop.tracking.console import status_line
    from strop.tracking.samples import write_table
    from strop.trainer.build import build_trainer, report_reward
    from strop.trainer.run_folder import RunFolder

    trainer = build_trainer(config, rows=rows)
    try:
        report_reward(trainer)
        if loads_policy(config):
            logger.info("loading the model")
        trainer.init_workers()
        started = time.perf_counter()
        with status_line() as show, trainer.progress.shown(show), trainer.timer.phase("testing"):
            samples = trainer.validator.samples(trainer.timer)
        seconds = time.perf_counter() - started
    finally:
        trainer.shutdown()
    try:
        write_table(out / SAMPLES, samples)  # first: the report may fail
        report = trainer.validator.report(samples, show=config.trainer.log_val_generations)
        RunFolder(out).write_config(config)
        results = {**_described(config), "seconds": round(seconds, 1), **report.as_json()}
        atomic_write_text(out / RESULTS, json.dumps(results, indent=2) + "\n")
    except OSError as error:
        found = trainer.validator.report(samples).metrics()
        scores = ", ".join(f"{name}={value:.4g}" for name, value in found.items())
        reason = write_failure(error, out)
        raise TrainingError(f"the results cannot be written to {out}: {reason}\nIt found {scores}") from error
    return report


def _require_outside(config: Config) -> None:
    """Raise ``ConfigError`` for what does not answer as the evaluation needs it."""
    found = list(ROLLOUTS[config.actor_rollout_ref.rollout.name].outside(config))
    if errors := [finding.text for finding in found if finding.level == "error"]:
        raise ConfigError(*errors)


def _described(config: Config) -> dict[str, Any]:
    """Return what was evaluated and how; ``config.yaml`` beside it has every key."""
    rollout: Any = config.actor_rollout_ref.rollout
    return {
        "model": config.actor_rollout_ref.model.path,
        "data": config.data.val_files,
        "limit": config.data.val_max_samples,
        "sampling": rollout.val_kwargs.model_dump(exclude={"n"}),
        "max_response_length": config.data.max_response_length,
        "rollout": rollout.name,
        **({} if loads_policy(config) else {"servers": rollout.http.urls}),
        "seed": config.trainer.seed,
    }


def settings(
    model: str,
    data: Sequence[str],
    *,
    step: int | None = None,
    best: bool = False,
    n: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    rollout: str = "hf",
    server: Sequence[str] = (),
    token_env: str | None = None,
    batch_size: int = 64,
    reward_model: str | None = None,
    reward: str | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    show: int = 3,
) -> dict[str, Any]:
    """Return the keys of an evaluation; the parameters are the options of ``strop eval``."""
    if not is_url(model):
        folder = Path(expand(model))
        if not (folder.exists() or may_be_a_hub_name(model)) and (near := runs_near(folder)):
            raise ConfigError(f"actor_rollout_ref.model.path={model}: no such folder here{near}")
        folder = model_in(folder, step=step, best=best)
        model = str(folder)
        if auto_class(folder) == "AutoModelForSequenceClassification":
            raise ConfigError(f"{model} is a reward model, which scores answers: give it with --reward-model")
    base = None
    if not is_url(model) and is_adapter(Path(model)):
        base = base_of_adapter(Path(model))
    if base and is_url(base):  # an adapter from elsewhere would choose what is downloaded
        base = None
    if temperature is None:
        temperature = 0.0 if n == 1 else 1.0
    facts = read_model_facts(base or model)
    window = facts.context if facts and facts.context else _PROMPT_LENGTH + _RESPONSE_LENGTH
    if max_response_length is None:
        max_response_length = min(_RESPONSE_LENGTH, max(window // 2, 1))
    if max_prompt_length is None:
        max_prompt_length = min(_PROMPT_LENGTH, max(window - max_response_length, 1))
    keys: dict[str, Any] = {
        "actor_rollout_ref.model.path": base or model,
        "actor_rollout_ref.rollout": {
            "name": "http" if server else rollout,
            "val_kwargs": {"n": n, "do_sample": temperature > 0, "temperature": temperature, "top_p": top_p},
        },
        "data": {
            "val_files": list(data),
            "val_batch_size": batch_size,
            "max_prompt_length": max_prompt_length,
            "max_response_length": max_response_length,
            "val_max_samples": limit,
        },
        "reward_model.val_num_examine": 0,
        "trainer": {
            "log_val_generations": show,
            "val_only": True,
            "resume_mode": "disable",
            "logger": ["console"],
            "default_local_dir": str(out or free_folder(model)),
        },
    }
    if server and base is not None:
        raise ConfigError(
            f"{model} is an adapter, which servers do not apply: they answer by their own weights. Give the "
            f"model whose tokenizer they have, as {base}"
        )
    if token_env is not None and not server:
        raise ConfigError(f"--token-env={token_env}: it is of servers, and there is no --server")
    if server:
        keys["actor_rollout_ref.rollout.http"] = {"urls": list(server), "keep_weights": True}
        keys["trainer.n_gpus_per_node"] = 1  # it sends requests
    if token_env is not None:
        keys["actor_rollout_ref.rollout.http.token_env"] = token_env
    if base is not None:
        keys["actor_rollout_ref.model.lora_adapter_path"] = model
        if Path(model, "tokenizer_config.json").is_file():
            keys["data.tokenizer"] = model
    if reward_model is not None:
        keys |= {"reward_model.enable": True, "reward_model.model.path": reward_model}
    if reward is not None:
        keys |= reward_keys(reward)
    return keys


def default_folder(model: str) -> Path:
    """Return the folder of an evaluation whose user named none: another one for each model.

    It is ``evaluations`` with the model's path below it: as given, or from the current folder.
    """
    path = Path(expand(model))
    if is_url(model) or not path.exists():  # a hub name
        return Path("evaluations", *expand(model).replace("://", "/").strip("/").split("/"))
    place = Path(os.path.abspath(path))
    own = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place.relative_to("/")
    return Path("evaluations", own)


def free_folder(model: str) -> Path:
    """Return ``default_folder``, or the first of it with ``-2``, ``-3``, ... that does not exist."""
    folder = default_folder(model)
    names = itertools.chain([folder.name], (f"{folder.name}-{number}" for number in itertools.count(2)))
    return next(free for name in names if not (free := folder.with_name(name)).exists())


def reward_keys(reward: str) -> dict[str, Any]:
    """Return the keys that choose a reward: ``FILE.py`` or ``FILE.py:NAME``, else a reward model.

    Raises ``ConfigError`` for what can be neither, such as the import path of a function.
    """
    path, colon, name = reward.rpartition(":")
    if colon and path.endswith(".py"):
        return {f"{_CUSTOM}.path": path, **({f"{_CUSTOM}.name": name} if name else {})}
    if reward.endswith(".py"):
        return {f"{_CUSTOM}.path": reward}
    is_model = is_url(reward) or may_be_a_hub_name(reward) or Path(expand(reward)).is_dir()
    if not (is_model or reward.endswith(".gguf")):
        module, name = reward.partition(":")[::2] if colon else reward.rpartition(".")[::2]
        meant = {f"{reward}.py": "", f"{module}.py": name, f"{module.replace('.', '/')}.py": name}
        found = (
            f"{file}{':' * bool(own)}{own}" for file, own in meant.items() if Path(expand(file)).is_file()
        )
        guess = next(found, "")
        raise ConfigError(
            f"reward: found {reward!r}, expected a Python file, as FILE.py or FILE.py:NAME, or a reward "
            "model, as its folder or OWNER/NAME on the hub"
            + (f"; did you mean {guess}?" if guess else similar_path(reward))
        )
    return {"reward_model.enable": True, "reward_model.model.path": reward}

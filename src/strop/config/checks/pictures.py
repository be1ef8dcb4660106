"""Rules about data sets with pictures, which are known once rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.config.backends import ROLLOUTS, engines_with
from strop.config.batch_plan import engine_of, forward_passes, keys_of_pass
from strop.config.keys import value_at
from strop.config.memory.facts import read_config_file
from strop.config.roles import model_paths
from strop.config.schema import Config
from strop.config.schema.supervised import SupervisedConfig
from strop.config.schema.teacher import teachers_of
from strop.errors import ConfigError


def require_pictures(config: Config | SupervisedConfig) -> None:
    """Raise ``ConfigError`` for all that cannot be used with a data set that has pictures."""
    paths, problems = model_paths(config), list[str]()
    if isinstance(config, Config):
        if not config.reward_model.sees:
            paths.pop("reward_model.model.path", None)
        problems += _problems(config)
    if problems := [*_blind(paths), *problems]:
        raise ConfigError(*(f"the data set has pictures: {problem}" for problem in problems))


def _blind(paths: Mapping[str, str]) -> Iterator[str]:
    for key, path in paths.items():
        content = read_config_file(path)
        if content and "vision_config" not in content:
            kind = content.get("model_type")
            yield f"{key}={path}: a model of text alone ({kind}); set it to one of the policy's family"


def _problems(config: Config) -> Iterator[str]:
    name = config.actor_rollout_ref.rollout.name
    if not ROLLOUTS[name].reads_pictures:
        able = " or ".join(other for other, kind in ROLLOUTS.items() if kind.reads_pictures)
        yield f"actor_rollout_ref.rollout.name={name} generates from text alone; set it to {able}"
    elif fault := ROLLOUTS[name].fault_of_pictures(config):
        yield fault
    elif package := ROLLOUTS[name].missing_for_pictures():
        yield (
            f"actor_rollout_ref.rollout.name={name} reads pictures with {package}, which is not installed: "
            "install it, or set hf"
        )
    for run in ("actor", *forward_passes(config)):
        if "pictures" not in engine_of(config, run).offers:
            yield f"{run}'s engine reads text alone; set its strategy to {engines_with('pictures')}"
        key = keys_of_pass(run).sequence_parallel
        if (size := value_at(config, key)) > 1:
            yield f"{key}={size} shares rows of text; set it to 1"
    if any(teacher.servers for teacher in teachers_of(config.teacher)):
        yield "teacher.servers get text alone; set teacher.model.path"
    rewards = config.reward_model
    if rewards.enable and rewards.sees and rewards.model.input_tokenizer is not None:
        yield (
            "reward_model.model.input_tokenizer: samples that are tokenized again lose their pictures; set "
            "it to null, with a reward model of the policy's family, or reward_model.sees=False, which puts "
            "[picture] in their places"
        )
    if rewards.enable and not rewards.sees and rewards.model.input_tokenizer is None:
        yield (
            "reward_model.sees=False: the reward model reads the policy's tokens, of which pictures are a "
            "part; set reward_model.model.input_tokenizer to the policy's tokenizer"
        )

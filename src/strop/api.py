"""strop as functions: ``strop.train``, ``distill``, ``sft``, ``train_rm``, ``dpo`` and ``evaluate``.

They build the configuration that the command of the same name reads from a command line, and run that
command; data and reward functions of the program go with it. Nothing heavy is imported before a function is
called.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from strop.passed import passing
from strop.results import Evaluation, Run
from strop.session import generators_kept, in_session

if TYPE_CHECKING:
    from strop import keywords as keys
    from strop.data.sources import Rows
    from strop.trainer.loop import OnStep

__all__ = ["Evaluation", "Run", "distill", "dpo", "evaluate", "sft", "train", "train_rm"]

Environment = str | Path | Callable[[], Any] | Mapping[str, Any] | None
Agent = str | Callable[..., Any] | Mapping[str, Any] | None
Reward = Callable[..., Any] | Sequence[Callable[..., Any]] | str | Path | None


@in_session("train")
def train(
    model: str | Path | keys.PretrainedModel | keys.TrainActorRolloutRefModel,
    data: keys.Rows | keys.TrainData,
    reward: Reward = None,
    algorithm: str | Callable[..., Any] | keys.TrainAlgorithm | None = None,
    *,
    environment: Environment = None,
    tools: Sequence[str | Callable[..., Any]] = (),
    agent: Agent = None,
    recipe: str | Path | None = "auto",
    config: str | Path | Mapping[str, Any] | None = None,
    tokenizer: keys.PretrainedModel | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[keys.TrainKeys],
) -> Run:
    """Train a model by reinforcement learning, as ``strop train`` does, and return the run.

    Args:
        model: the path or hub name of a model; a model of transformers, with ``tokenizer``, which is saved to
            ``model`` in the run folder (and stays where it is: free its memory if the run needs it); or a
            dict of keys below ``actor_rollout_ref.model``.
        data: rows as a list of dicts, a ``datasets.Dataset``, a data frame or a pyarrow table; the name of a
            file, or a list of names (``strop docs data``); or a dict of keys below ``data``, in which
            ``train_files`` and ``val_files`` are any of these:
            ``dict(train_files=rows, prompt_key="question", answer_key="answer")``.
        reward: a function that gets by name what it asks for (``strop docs rewards``), or has TRL's signature
            ``(completions, **columns)``; a list of functions, whose scores are added; a Python file
            ``reward.py`` or ``reward.py:name``; the path or hub name of a reward model; or None: the built-in
            scorer of each row's ``data_source``. Functions run in a process of their own, as a copy made by
            cloudpickle; lambdas, closures and functions of a notebook work.
        algorithm: ``grpo``, ``ppo``, ``rloo``, ``reinforce++``, ``remax``, a function that estimates
            advantages, or a dict of keys below ``algorithm``. None: that of ``config``, else the recipe's.
        environment: what answers the turns of a sample (``strop docs environments``): a class or a function
            that makes its objects, ``file.py:Class``, ``gym:ID``, ``mcp:COMMAND``, a dict of these by the
            column ``environment`` of a row, or a dict of keys below ``environment``.
        tools: what the policy may call: functions, classes, ``strop.tools.python``, ``mcp:COMMAND``.
        agent: a program that owns its loop and samples from the policy (``strop docs agents``): a function
            ``run(row, base_url, api_key)``, ``file.py:run``, or a dict of keys below ``agent``, such as
            ``dict(command="node agent.js")``.
        recipe: values over the defaults and below ``config``: ``grpo``, ``ppo``, or a YAML file
            (``strop docs recipes``). ``auto``: that of ``algorithm``, or ``grpo``. None: the defaults.
        config: a YAML file laid over the defaults, or a dict of keys.
        on_step: called in this process after each iteration as ``on_step(step, metrics)``, with the metrics
            that ``run.metrics`` has. If it returns ``False``, the run is saved and returned as one that has
            ended. Its exceptions are raised as they are, after the run is saved.
        overrides: further keys (``strop docs config``), over ``config``: ``lr``, ``steps``, ``n`` (answers
            to each prompt) and ``out`` (the run folder); a section as a dict, ``trainer=dict(save_freq=10)``;
            or a whole name, ``**{"trainer.save_freq": 10}``. Keys that take an import path, as
            ``policy_loss`` does, take the function itself.

    Raises:
        StropError: wrong keys, data or rewards, before a model is loaded.
        KeyboardInterrupt: after the run was ended and its workers are gone. ``strop.Run(folder)`` reads what
            it wrote, and the same call goes on from its last checkpoint.
    """
    given = _Given("train", config, overrides, recipe)
    given.data(data)
    given.algorithm(algorithm)
    given.reward(reward)
    given.environment(environment, tools)
    given.agent(agent)
    given.model("actor_rollout_ref.model", model, tokenizer)  # last: it names the folder by the other keys
    return _train(given, on_step)


@in_session("train")
def distill(
    student: str | Path | keys.PretrainedModel | keys.TrainActorRolloutRefModel,
    teacher: str | Path | Mapping[str, Any],
    data: keys.Rows | keys.TrainData,
    /,
    reward: Reward = None,
    *,
    environment: Environment = None,
    tools: Sequence[str | Callable[..., Any]] = (),
    agent: Agent = None,
    recipe: str | Path | None = "distill",
    config: str | Path | Mapping[str, Any] | None = None,
    tokenizer: keys.PretrainedModel | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[keys.TrainKeys],
) -> Run:
    """Train a student on a teacher's judgement of its own answers, as ``strop distill`` does.

    The rows need a prompt only. ``teacher`` is the path or hub name of a model, ``reference`` for the student
    with its LoRA adapters off, or a dict of keys below ``teacher.model``; further keys are an argument
    ``teacher=dict(kl="js")``. With a ``reward`` the teacher's part is added to what that trains (``strop docs
    distillation``). The other arguments are those of ``train``.
    """
    given = _Given("train", config, overrides, recipe)
    given.data(data)
    given.reward(reward)
    given.set("teacher.model" if isinstance(teacher, Mapping) else "teacher.model.path", teacher)
    given.environment(environment, tools)
    given.agent(agent)
    given.model("actor_rollout_ref.model", student, tokenizer)  # last: it names the folder by the other keys
    return _train(given, on_step)


@in_session("sft")
def sft(
    model: str | Path | keys.PretrainedModel | keys.SftModel,
    data: keys.Rows | keys.SftData,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    tokenizer: keys.PretrainedModel | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[keys.SftKeys],
) -> Run:
    """Fine-tune a model on responses, as ``strop sft`` does; the rows have ``prompt`` and ``response``.

    The arguments are those of ``train``; ``model`` may be a dict of keys below ``model``.
    ``strop docs supervised_config`` lists the keys.
    """
    return _supervised("sft", model, data, config, overrides, tokenizer, on_step)


@in_session("train-rm")
def train_rm(
    model: str | Path | keys.PretrainedModel | keys.SftModel,
    data: keys.Rows | keys.TrainRmData,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    tokenizer: keys.PretrainedModel | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[keys.TrainRmKeys],
) -> Run:
    """Train a reward model, as ``strop train-rm`` does, on ``prompt``, ``chosen`` and ``rejected``.

    The arguments are those of ``sft``.
    """
    return _supervised("train-rm", model, data, config, overrides, tokenizer, on_step)


@in_session("dpo")
def dpo(
    model: str | Path | keys.PretrainedModel | keys.SftModel,
    data: keys.Rows | keys.TrainRmData,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    tokenizer: keys.PretrainedModel | None = None,
    on_step: OnStep | None = None,
    **overrides: Unpack[keys.DpoKeys],
) -> Run:
    """Train a policy, as ``strop dpo`` does, on ``prompt``, ``chosen`` and ``rejected``.

    The arguments are those of ``sft``.
    """
    return _supervised("dpo", model, data, config, overrides, tokenizer, on_step)


@in_session("evaluation")
def evaluate(
    model: str | Path,
    data: keys.Rows | keys.TrainData,
    reward: Reward = None,
    *,
    n: int = 1,
    temperature: float | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    environment: Environment = None,
    tools: Sequence[str | Callable[..., Any]] = (),
    agent: Agent = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **overrides: Unpack[keys.EvaluateKeys],
) -> Evaluation:
    """Generate answers to prompts and score them, as ``strop eval`` does; return the figures.

    Args:
        model: the path or hub name of a model, such as ``run.model_path``.
        data: as for ``train``; a dict of keys names its rows ``val_files``.
        reward: as for ``train``.
        n: answers to each prompt.
        temperature: of sampling; 0 is greedy. None: 0 for one answer, else 1.
        max_prompt_length: in tokens; a longer prompt is an error. None: 1024, or what the window leaves.
        max_response_length: in tokens; a longer answer is cut. None: 512, or half of the window.
        limit: use only the first prompts of each data source.
        out: folder for ``samples.parquet`` and ``results.json``. None: a new one in ``evaluations``.
        environment: as for ``train``, and ``tools`` and ``agent``.
        config: as for ``train``.
        overrides: as for ``train``.
    """
    from strop.errors import ConfigError
    from strop.trainer import evaluation

    model = getattr(model, "model_path", model)  # of a Run
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model: found {type(model).__name__}, expected a path or a hub name; save it first, with its "
            "tokenizer: model.save_pretrained(FOLDER)"
        )
    given = _Given("train", config, overrides)
    given.data(data, "val_files")
    given.reward(reward)
    given.environment(environment, tools)
    given.agent(agent)
    own = evaluation.settings(
        str(model),
        (),
        n=n,
        temperature=temperature,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        limit=limit,
        out=out,
    )
    with passing(given.functions):
        loaded = given.load(below=own)
        with generators_kept():
            evaluation.evaluate(loaded, rows=given.rows)
    return Evaluation(loaded.trainer.default_local_dir)


class _Given:
    """The arguments of a function as configuration keys, and the objects that these stand for."""

    def __init__(
        self,
        command: str,
        config: str | Path | Mapping[str, Any] | None,
        overrides: Mapping[str, Any],
        recipe: str | Path | None = None,
    ) -> None:
        from strop.config.trees import TREES

        self.tree = TREES[command]
        is_file = isinstance(config, str | Path)
        self.recipe = recipe
        self.file = str(config) if is_file else None
        self.values: dict[str, Any] = {}
        self.rows: list[Rows] = []
        self.functions: dict[str, Callable[..., Any]] = {}
        long = {self.tree.short.get(key, key): value for key, value in overrides.items()}
        self.overrides = [self._with_sources({} if is_file else config), self._with_sources(long)]

    def set(self, key: str, value: Any) -> None:
        self.values[key] = self._plain(value)

    def model(self, key: str, model: Any, tokenizer: Any) -> None:
        from strop.errors import ConfigError

        if isinstance(model, Mapping | str | Path) and tokenizer is None:
            self.set(key if isinstance(model, Mapping) else f"{key}.path", model)
            return
        if not (hasattr(model, "save_pretrained") and hasattr(tokenizer, "save_pretrained")):
            raise ConfigError(
                f"model: found {type(model).__name__} with tokenizer={type(tokenizer).__name__}; expected a "
                "path or hub name, or a model of transformers with tokenizer=its tokenizer"
            )
        from strop.data.tokenize import tokenizer_fingerprint
        from strop.engines.base import weights_hash
        from strop.files import atomic_folder
        from strop.models.source import save_model
        from strop.trainer.run_folder import run_lock

        weights, settings = weights_hash(model.named_parameters()), model.config.to_json_string()
        text = f"{weights} {settings} {tokenizer_fingerprint(tokenizer)}"
        self.set(f"{key}.path", f"{type(model).__name__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
        folder = self.load().trainer.default_local_dir  # which may be named after the model
        path = Path(folder, "model", self.values[f"{key}.path"]).expanduser().absolute()
        if not path.exists():  # a run in this folder may hold the lock: its model is there
            path.parent.mkdir(parents=True, exist_ok=True)
            with run_lock(path.parent.parent):
                if not path.exists():  # another process was first
                    with atomic_folder(path) as building:
                        save_model(model, building)
                        tokenizer.save_pretrained(building)
        self.set(f"{key}.path", path)
        self.overrides.append({"trainer.default_local_dir": folder})

    def data(self, data: Any, main: str = "train_files") -> None:
        from strop.errors import ConfigError

        if _is_section(data) and {"prompt", "question"} & set(data):  # one row, or a list for each column
            raise ConfigError(
                f"data: found a dict with {', '.join(map(str, data)):.80}, expected rows: a list with a dict "
                "for each, as [{'prompt': '2+3=', 'answer': '5'}], or pandas.DataFrame(columns)"
            )
        self.values |= self._with_sources({"data": data if _is_section(data) else {main: data}})

    def _source(self, value: Any, key: str) -> Any:
        """Return the name of a file, or one that stands for rows in memory."""
        several = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(item, str | Path) for item in several):
            return value
        from strop.data.sources import Rows, fingerprint

        split = key.rpartition(".")[2].removesuffix("_files")
        digest, _ = fingerprint(Rows(split, value))
        rows = Rows(f"{split}-{digest}", value)  # a run is continued with the same rows only
        self.rows.append(rows)
        return str(rows)

    def algorithm(self, algorithm: Any) -> None:
        from strop.config.recipes import by_algorithm

        recipe, estimator = by_algorithm(None if isinstance(algorithm, Mapping) else algorithm)
        self.recipe = recipe if self.recipe == "auto" else self.recipe
        if isinstance(algorithm, Mapping):
            self.set("algorithm", algorithm)
        elif estimator is not None:
            self.set("algorithm.adv_estimator", estimator)

    def reward(self, reward: Reward) -> None:
        from strop.errors import ConfigError
        from strop.trainer.evaluation import reward_keys

        if reward is None:
            return
        if isinstance(reward, str | Path):
            self.values |= reward_keys(str(reward))
            return
        functions = list(reward) if isinstance(reward, list | tuple) else [reward]
        for function in functions:
            if not callable(function):
                raise ConfigError(
                    f"reward: found {function!r:.80}, expected a function, a list of functions, a Python "
                    "file or the path of a reward model"
                )
        names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        names = [
            name if name.isidentifier() and names.count(name) == 1 else f"reward_{number}"
            for number, name in enumerate(names, 1)
        ]
        if not isinstance(reward, list | tuple):
            self.set("custom_reward_function.path", reward)
            return
        parts = {name: {"scorer": function} for name, function in zip(names, functions, strict=True)}
        self.set("reward_model.parts", {"rule": 0, **parts})

    def environment(self, environment: Environment, tools: Sequence[Any]) -> None:
        from strop.config.schema.environment import EnvironmentConfig
        from strop.errors import ConfigError

        known = EnvironmentConfig.model_fields.keys()
        if isinstance(environment, Mapping) and environment.keys() & known:
            self.set("environment", environment)
        elif environment is not None:
            for one in environment.values() if isinstance(environment, Mapping) else [environment]:
                if not isinstance(one, str) and not callable(one):
                    raise ConfigError(
                        f"environment is an object of {type(one).__name__}: expected the class itself, "
                        "of which each sample gets an object"
                    )
            self.set("environment.path", environment)
        if tools:
            self.set(
                "environment.tools", [tools] if isinstance(tools, str) or callable(tools) else list(tools)
            )

    def agent(self, agent: Agent) -> None:
        if agent is not None:
            self.set("agent" if isinstance(agent, Mapping) else "agent.path", agent)

    def load(self, defaults: Mapping[str, Any] | None = None, below: Mapping[str, Any] | None = None) -> Any:
        """Return the configuration; ``defaults`` lie below the user's file, ``below`` over it."""
        from strop.config.load import load_tree

        values = [below or {}, self.values, *self.overrides]
        return load_tree(
            self.tree, config_path=self.file, recipe=self.recipe, defaults=defaults, values=values
        )

    def _with_sources(self, keys: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return keys as configuration has them, with names for rows in memory."""
        found = {}
        for key, value in (keys or {}).items():
            if key in ("data.train_files", "data.val_files"):
                value = self._source(value, key)
            elif key == "data" and _is_section(value):
                value = {
                    name: self._with_sources({f"data.{name}": item})[f"data.{name}"]
                    for name, item in value.items()
                }
            found[key] = self._plain(value)
        return found

    def _plain(self, value: Any) -> Any:
        """Return a value as configuration has it: paths as texts, tuples as lists, names for functions."""
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            return {str(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        return self._function(value) if callable(value) else value

    def _function(self, function: Callable[..., Any]) -> str:
        """Return the name that stands for a function: another function has another one."""
        from strop.rewards.identity import fingerprint

        name = getattr(function, "__name__", type(function).__name__)
        word = f"function:{name if name.isidentifier() else 'function'}-{fingerprint(function)}"
        self.functions[word] = function
        return word


def _is_section(data: Any) -> bool:
    return isinstance(data, Mapping) and type(data).__module__.partition(".")[0] != "datasets"


def _supervised(
    command: str, model: Any, data: Any, config: Any, overrides: Any, tokenizer: Any, on_step: Any
) -> Run:
    given = _Given(command, config, overrides)
    given.data(data)
    given.model("model", model, tokenizer)
    return _train(given, on_step)


def _train(given: _Given, on_step: OnStep | None) -> Run:
    from strop.trainer.commands import fitted, train

    with passing(given.functions):
        config, data, _ = fitted(given.load, given.rows)
        with generators_kept():
            train(config, rows=given.rows, data=data, on_step=on_step)
    return Run(config.trainer.default_local_dir)

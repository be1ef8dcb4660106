"""Build a trainer from a configuration: worker classes, placement, rewards and start-up checks.

Copy ``build_trainer`` for a run with another worker, reward or placement: its parts are public.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.agents.chat import ChatFormat, Refusal, read_request
from strop.agents.program import load_program
from strop.checkpoint.record import require_same_run
from strop.checkpoint.store import Checkpoints
from strop.config.memory.choices import with_values
from strop.config.memory.facts import fault_of_weights
from strop.config.placement import Placement, runs_on_ray, uses_gpu
from strop.config.roles import (
    has_reward,
    has_teacher_role,
    model_paths,
    roles_of,
    teacher_models,
    tokenizer_paths,
    uses_critic,
)
from strop.config.schema import Config, RootConfig
from strop.config.schema.agent import uses_agent
from strop.config.schema.data import RowsConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.reward import RewardModelModelConfig
from strop.controller.group import LocalWorkerGroup
from strop.controller.pools import ResourcePoolManager, Role
from strop.data.hub import local_tokenizer, require_from_hub
from strop.data.loader import RowDataset
from strop.data.pictures.parts import digests_of
from strop.data.prompts import (
    AUTO,
    PromptFormat,
    as_taken,
    encode_prompts,
    encode_responses,
    texts_before_answers,
)
from strop.data.rl_dataset import RLHFDataset, all_rows, columns_of
from strop.data.sources import Rows
from strop.data.template_check import chat_template_of, require_end
from strop.data.tokenize import tokenizer_fingerprint
from strop.engines.device import pick_device, require_gpu
from strop.environments.loading import Environments, load_environments
from strop.environments.pool import EnvironmentPool, row_of
from strop.errors import Attempts, ConfigError, ModelError, RewardError
from strop.manifest import covering, remedy_of, require_unchanged
from strop.models.folder import (
    attention_for,
    end_token_ids,
    generation_config_of,
    generation_problem,
    import_external_lib,
    load_model_config,
    load_tokenizer,
    score_cap,
)
from strop.rewards.base import Example, Reward
from strop.rewards.example import score_first_row
from strop.rewards.loading import load_reward_manager
from strop.rewards.manager import RewardManager
from strop.rewards.router import UnknownSourceError
from strop.rollout.turn_format import TurnFormat, require_chat
from strop.tracking.trackers import resolve_tracker
from strop.trainer.ray_trainer import TEACHER, RayPPOTrainer
from strop.trainer.seeds import seed_global_generators
from strop.workers.vocabulary import REWRITE, require_same_vocabulary

logger = logging.getLogger("strop")


def check_models(config: Config, tokenizer: Any) -> None:
    """Check every model of a run by its configuration and tokenizer; see ``check_model``.

    Warn if samples are tokenized again although reward model and policy share a tokenizer whose chat template
    changes them.
    """
    cache_dir, rewards = config.data.cache_dir, config.reward_model
    policy = config.actor_rollout_ref.model
    attempt = Attempts()
    size = attempt(lambda: check_model("actor_rollout_ref.model", policy, tokenizer, cache_dir))
    if uses_critic(config):
        critic = config.critic.model
        remedy = (
            f"Set critic.model.path to the policy or to another model with the tokenizer of {policy.path}"
        )
        ids = None if critic.path == policy.path else tokenizer  # else the policy's error would be repeated
        attempt(lambda: check_model("critic.model", critic, ids, cache_dir, size=size, remedy=remedy))
    if has_teacher_role(config):
        for key, model in teacher_models(config).items():
            attempt(partial(check_teacher, key, model, tokenizer, config, size))
    if rewards.enable:
        shared = rewards.model.input_tokenizer is None

        def check_reward_model() -> None:
            require_same_vocabulary(config)
            if shared:
                check_model("reward_model.model", rewards.model, tokenizer, cache_dir, remedy=REWRITE)

        attempt(check_reward_model)
        if not shared:
            attempt(lambda: _check_own_tokenizer(rewards.model, tokenizer, cache_dir))
    attempt.raise_errors()


def warn_of_generation_config(key: str, model: ModelConfig, cache_dir: Any) -> None:
    """Warn of a generation configuration that is saved with the trained model, and that is not valid."""
    folder = local_tokenizer(model.path, cache_dir)
    if problem := generation_problem(folder):
        logger.warning(
            "%s.path=%s: its generation configuration is not valid to transformers, and is saved as it is "
            "with the trained model; correct it there for programs that generate by it (%s)",
            key,
            model.path,
            problem,
        )


def check_teacher(key: str, model: Any, tokenizer: Any, config: Any, size: int | None) -> None:
    """Check a teacher; see ``check_model``."""
    remedy = f"Set it to a model with the tokenizer of {config.trained_model.path}"
    check_model(key, model, tokenizer, config.data.cache_dir, size=size, remedy=remedy, teaches=True)


def check_model(
    key: str,
    model: Any,
    tokenizer: Any,
    cache_dir: Any,
    *,
    size: int | None = None,
    remedy: str = "",
    teaches: bool = False,
) -> int:
    """Check the model of a section against the ids that it will read; return the size of its vocabulary.

    ``key`` is the section's; ``tokenizer`` makes the ids (None: the model's own does), ``size`` is that of
    the policy's vocabulary. Tokens that one tokenizer lacks and added tokens may differ, and a larger
    embedding matrix has rows to spare. Of a model without a tokenizer, the size must be the policy's. A model
    that ``teaches`` may be smaller, as output layers are cut to the words of the tokenizer, and the policy
    imitates its use of added tokens, so a warning names one that differs.

    Raises:
        ModelError: ids are out of range, or mean other tokens to the model.
        ConfigError: an attention back-end that leaves out a part of the model; see ``attention_for``.
    """
    import_external_lib(model.external_lib)
    folder = local_tokenizer(model.path, cache_dir)
    options = model.model_dump()
    trust = model.trust_remote_code
    own_config = load_model_config(
        folder, override_config=options.get("override_config"), trust_remote_code=trust
    )
    requested = options.get("attn_implementation")  # reward models have no such key
    chosen = attention_for(own_config, requested, key=f"{key}.attn_implementation")
    if chosen != requested:
        logger.warning(
            "%s.path=%s: eager attention is used, because the model caps its attention scores "
            "(attn_logit_softcapping=%s), and sdpa does not",
            key,
            model.path,
            score_cap(own_config),
        )
    own_size = own_config.get_text_config().vocab_size
    if tokenizer is not None:
        found = f"{key}.path={model.path}"
        compared = (teaches or own_size >= (size or 0)) and _require_same_tokens(
            found, folder, own_size, tokenizer, remedy, trust=trust, teaches=teaches
        )
        if size is not None and own_size != size and not compared:
            reason = "" if own_size < size and not teaches else ", and no tokenizer by which to compare them"
            raise ModelError(
                f"{found}: the vocabularies differ: the policy has {size} tokens, this model has {own_size} "
                f"tokens{reason}. {remedy}"
            )
    return own_size


def _require_same_tokens(
    found: str, folder: Path, size: int, tokenizer: Any, remedy: str, *, trust: bool, teaches: bool
) -> bool:
    """Raise ``ModelError`` if ids mean other tokens to the model; return False if it has no tokenizer."""
    remedy = remedy or "Set data.tokenizer to null, or to a tokenizer of this model"
    ours = _ordinary_tokens(tokenizer)
    # Text-only models keep the tokenizers of their families, whose placeholders of pictures have no row.
    usual = set(type(tokenizer).SPECIAL_TOKENS_ATTRIBUTES)  # the instance's names have further ones
    others = {token for name, token in tokenizer.special_tokens_map.items() if name not in usual}
    ids = [token_id for token, token_id in tokenizer.get_vocab().items() if token not in others]
    if (largest := max(ids, default=0)) >= size:
        raise ModelError(
            f"{found}: its vocabulary has {size} tokens, and the tokenizer makes ids up to {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}). {remedy}, or add the tokens to the model by "
            "resize_token_embeddings"
        )
    if tokenizer.name_or_path == str(folder):
        return True
    try:
        other = load_tokenizer(folder, trust_remote_code=trust)
    except ModelError:
        return False
    theirs = _ordinary_tokens(other)
    differing = sorted(token_id for token_id in ours.keys() & theirs if ours[token_id] != theirs[token_id])
    if differing:
        first = differing[0]
        raise ModelError(
            f"{found}: its vocabulary has {size} tokens, but {len(differing)} ids mean other tokens to it "
            f"than to the tokenizer: the first, {first}, is {ours[first]!r} to the tokenizer and "
            f"{theirs[first]!r} to the model. {remedy}"
        )
    if teaches:
        added, own = ({i: token for token, i in t.get_added_vocab().items()} for t in (other, tokenizer))
        differing = [token_id for token_id in added.keys() & own if added[token_id] != own[token_id]]
        # the end token first: of a teacher with another one the policy learns not to end
        for token_id in sorted(differing, key=lambda i: (i != tokenizer.eos_token_id, i))[:1]:
            logger.warning(
                "%s: added tokens differ: id %s is %r to the tokenizer and %r to this model, whose use of it "
                "the policy imitates. %s",
                *(found, token_id, own[token_id], added[token_id], remedy),
            )
    return True


def _ordinary_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.get_added_vocab()
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token not in added}


def _check_own_tokenizer(model: RewardModelModelConfig, tokenizer: Any, cache_dir: Any) -> None:
    """Check a reward model against its own tokenizer, and warn of a chat template that changes samples."""
    folder = local_tokenizer(model.path, cache_dir)
    own = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    check_model("reward_model.model", model, own, cache_dir)
    require_end(own, f"reward_model.model.path={model.path}")
    is_shared = tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer)
    if is_shared and own.chat_template is not None and _template_differs(own):
        logger.warning(
            "reward_model.model.input_tokenizer=%s: policy and reward model have one tokenizer, and its chat "
            "template ends a conversation otherwise than a policy does. A reward model of `strop train-rm` "
            "has learned from what a policy generates: set the key to null for it",
            model.input_tokenizer,
        )


def _template_differs(tokenizer: Any) -> bool:
    """Return True if the chat template writes a response otherwise than a policy generates it."""
    prompt, response = [{"role": "user", "content": "1"}], {"role": "assistant", "content": "2"}
    before = texts_before_answers(tokenizer, AUTO, is_chat=True)
    answers = encode_responses(["2"], tokenizer, before=before)
    generated = [*encode_prompts([prompt], tokenizer)[0], *answers[0]]
    whole = tokenizer.apply_chat_template(as_taken([*prompt, response], tokenizer), return_dict=False)
    return whole != generated


def fetch_tokenizer(
    config: RootConfig, model: ModelConfig, *, models: Iterable[str], tokenizers: Iterable[str], weights: bool
) -> Any:
    """Prepare this process for a run, download what is on the hub, and return the tokenizer of ``model``.

    ``weights=False``, of a check, leaves the weights of ``models`` on the hub, and random generators as they
    are; processes on Ray fetch their own.
    Raises ``CheckpointError`` if the tokenizer is of an exported model and has changed since.
    """
    if weights:
        seed_global_generators(config.trainer.seed)
    import_external_lib(model.external_lib)
    if not uses_gpu(config):
        require_gpu(config.strategy_of("model"))
    if config.trainer.device == "cuda" and not runs_on_ray(config):
        pick_device("cuda")  # raises for a GPU that this process lacks
    cache_dir, weights = config.data.cache_dir, weights and not runs_on_ray(config)
    require_from_hub(models=models, tokenizers=tokenizers, cache_dir=cache_dir, weights=weights)
    folder = local_tokenizer(config.data.tokenizer or model.path, cache_dir)
    # Workers compare the weights, of folders from which they load a model.
    files = {name: entry for name, entry in covering(folder).items() if not name.endswith(".safetensors")}
    require_unchanged(str(folder), folder, files, remedy_of(folder))
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    set_chat_template(tokenizer, config.data)
    return tokenizer


def require_whole(models: Iterable[str]) -> None:
    """Raise ``ModelError`` for a local model whose weights are not whole; see ``fault_of_weights``."""
    for path in models:
        if fault := fault_of_weights(path):
            raise ModelError(f"model {path}: {fault}")


def set_chat_template(tokenizer: Any, data: RowsConfig) -> None:
    """Set the template of ``tokenizer`` to ``data.chat_template``; warn of variables that none reads."""
    if (template := chat_template_of(data)) is not None:
        tokenizer.chat_template = template
    where = f"tokenizer {tokenizer.name_or_path}" if template is None else "data.chat_template"
    require_end(tokenizer, where, data.apply_chat_template_kwargs)
    unread = [name for name in data.apply_chat_template_kwargs if name not in str(tokenizer.chat_template)]
    if unread and tokenizer.chat_template is not None:
        logger.warning(
            "data.apply_chat_template_kwargs: the chat template reads no %s, so it changes nothing",
            ", ".join(unread),
        )


def build_trainer(
    config: Config,
    *,
    with_weights: bool = True,
    rows: Sequence[Rows] = (),
) -> RayPPOTrainer:
    """Return a trainer whose ``init_workers()`` and ``fit()`` are left to call; no model is loaded yet.

    Everything that can be checked before is checked here. ``with_weights=False`` leaves the weights of models
    on the hub there, for a caller that does not train. ``rows`` in memory are read where
    ``data.train_files`` and ``data.val_files`` have their names.

    Raises:
        StropError: wrong inputs; several of them are ``SeveralErrors``.
    """
    require_checkpoint(Checkpoints.of(config), config)  # first: of another model nothing is downloaded
    tokenizer = fetch_tokenizer(
        config,
        config.actor_rollout_ref.model,
        models=model_paths(config).values(),
        tokenizers=tokenizer_paths(config).values(),
        weights=with_weights,
    )
    attempt = Attempts()
    attempt(lambda: check_models(config, tokenizer))
    if not config.trainer.val_only:
        warn_of_generation_config(
            "actor_rollout_ref.model", config.actor_rollout_ref.model, config.data.cache_dir
        )
    for name in config.trainer.logger:
        # name=name: the lambda would otherwise read the variable of the loop
        attempt(lambda name=name: resolve_tracker(name))

    policy = (Role.ActorRollout, Role.Actor, Role.Rollout, Role.RefPolicy, Role.ActorRolloutRef)
    role_worker_mapping: dict[Any, type | str] = {
        **dict.fromkeys(policy, "strop.workers.policy:ActorRolloutRefWorker"),
        Role.Critic: "strop.workers.critic:CriticWorker",
        Role.RewardModel: "strop.workers.reward_model:RewardModelWorker",
        **({TEACHER: "strop.workers.teacher:TeacherWorker"} if TEACHER in roles_of(config) else {}),
    }
    placement = Placement.from_config(config)
    resource_pool_manager = ResourcePoolManager(
        resource_pool_spec=placement.pools,
        mapping={role if role == TEACHER else Role[role]: placement.roles[role] for role in roles_of(config)},
    )
    rewards = config.reward_model
    environments = attempt(lambda: load_environments(config.environment))
    if environments is not None:
        form = attempt(lambda: turn_format(config, environments, tokenizer))
        if form is not None:
            logger.info("%s", form.history())
    program = attempt(lambda: load_program(config.agent))
    if program is not None:
        attempt(lambda: chat_format(config, tokenizer))
    gives_rewards = uses_agent(config) or (environments is not None and environments.gives_rewards)
    reward_fn, val_reward_fn = (
        attempt(lambda c=c, n=n: load_reward_manager(c, tokenizer, n, gives_rewards, **rewards.reward_kwargs))
        for c, n in ((config, rewards.num_examine), (validating(config), rewards.val_num_examine))
    )
    trainer = attempt(
        lambda: RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=worker_group_class(config),
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            rows=rows,
            environments=environments,
            program=program,
        )
    )
    attempt.raise_errors()
    try:
        _require_scorers(trainer)
        require_whole(model_paths(config).values())  # last: what is wrong with the rest needs no weights
    except BaseException:  # whose traceback, which a notebook keeps, keeps the scoring processes alive
        trainer.shutdown()
        raise
    return trainer


def validating(config: Config) -> Config:
    """Return ``config`` with the reward manager of validations, which scores without a reward, too."""
    if has_reward(config):
        return config
    return with_values(config, {"reward_model.reward_manager": "naive"})


def turn_format(
    config: Config, environments: Environments, tokenizer: Any, pictures: Any | None = None
) -> TurnFormat:
    """Return how turns are written; ``ModelError`` if the template shows no answers or calls."""
    ends = end_ids(config.actor_rollout_ref.model, tokenizer, config.data.cache_dir)
    return TurnFormat(config, environments, tokenizer, ends, pictures)


def chat_format(config: Config, tokenizer: Any) -> ChatFormat:
    """Return how an agent's messages are written.

    Raises ``ModelError`` if the template shows no answers, or ``agent.parser`` names no parser.
    """
    ends = end_ids(config.actor_rollout_ref.model, tokenizer, config.data.cache_dir)
    form = ChatFormat(config, tokenizer, ends, config.agent.parser)
    try:
        form.bridge(read_request({"messages": [{"role": "user", "content": "Hi"}]}))
        if config.agent.parser != "auto":  # what the template writes counts only if a program has tools
            form.parser()
    except Refusal as refusal:
        raise ModelError(str(refusal)) from refusal
    return form


def end_ids(model: ModelConfig, tokenizer: Any, cache_dir: Any) -> list[int]:
    """Return the token ids that end a response of the model, without loading it.

    Raises ``ModelError`` if its generation configuration cannot be read.
    """
    folder = local_tokenizer(model.path, cache_dir)
    return end_token_ids(generation_config_of(folder, model.override_config), tokenizer)


def worker_group_class(config: RootConfig) -> type:
    """Return the kind of worker group that ``trainer.worker_group`` and the placement require."""
    if not runs_on_ray(config):
        return LocalWorkerGroup
    from strop.controller.ray.group import RayWorkerGroup

    return RayWorkerGroup


def require_checkpoint(checkpoints: Checkpoints, config: RootConfig) -> None:
    """Raise an error if the checkpoint to resume from is damaged or of another run; log what is resumed."""
    checkpoint = checkpoints.find(config.trainer.resume_mode, lambda found: require_same_run(found, config))
    if checkpoint is not None:
        require_same_run(checkpoint, config)


_ROWS_WITH_ANSWERS = 1000
"""Rows, from the first, in which a ground truth is looked for."""


def try_reward(trainer: RayPPOTrainer, *, is_check: bool = True) -> tuple[Example | None, str]:
    """Score the first row; see ``strop.rewards.example.score_first_row``."""
    config = trainer.config
    sampling = config.actor_rollout_ref.rollout
    reward_fn, n = trainer.reward_fn, sampling.n
    if config.trainer.val_only:
        reward_fn, n = trainer.val_reward_fn, sampling.val_kwargs.n
    return score_first_row(config.reward_model, reward_fn, _rows(trainer), n=n, is_check=is_check)


def _rows_of_run(trainer: RayPPOTrainer) -> Any:
    loader = trainer.val_loader if trainer.config.trainer.val_only else trainer.train_loader
    return loader.dataset


def _rows(trainer: RayPPOTrainer) -> Generator[dict[str, Any]]:
    """Yield the rows of the run, with ``input_ids``."""
    dataset = _rows_of_run(trainer)
    yield from (columns_of(dataset, row) for row in range(len(dataset)))


def _images_of(row: Mapping[str, Any]) -> list[int] | None:
    """Return the digests of a row's pictures; None if ``images`` is no column or the user's own."""
    images: Any = row.get("images")
    return digests_of(images.tolist()) if hasattr(images, "dtype") else None


def try_reset(trainer: RayPPOTrainer) -> str:
    """Return the text of ``reset`` for one of the first two rows; see ``EnvironmentPool.try_reset``.

    Raises ``DataError`` for a text that their prompts cannot have.
    """
    if trainer.environments is None:
        return ""
    rows = [row_of({**row, "uid": "0"}, _images_of(row)) for row in itertools.islice(_rows(trainer), 2)]
    for row in rows:
        del row["input_ids"]
    data, pool = trainer.config.data, EnvironmentPool(trainer.environments, trainer.config.environment)
    with contextlib.closing(pool):
        text = pool.try_reset(rows)
    require_chat(PromptFormat.of(data), trainer.tokenizer, rows[0][data.prompt_key], text)
    return text


def two_turns(trainer: RayPPOTrainer) -> tuple[str, list[tuple[bool, str]], str] | None:
    """Return the first row's prompt, the turns after it, and what the chat template does to history.

    None without an environment. The prompt has the text of ``reset``, which is called; raises as
    ``try_reset`` does. The texts come with True if they are sampled; see ``TurnFormat``.
    """
    environments, tokenizer = trainer.environments, trainer.tokenizer
    if environments is None:
        return None
    text, row = try_reset(trainer), next(_rows(trainer))
    pictures = getattr(all_rows(_rows_of_run(trainer)), "pictures", None)
    form = turn_format(trainer.config, environments, tokenizer, pictures)
    tools = environments.tools_of(row)
    ids = row["input_ids"]
    if text:
        (ids,) = form.fitted(
            [form.prompt(row, tools, text, _images_of(row) or ())], trainer.config.data.max_prompt_length
        )
    return tokenizer.decode(ids), form.two_turns(tools), form.history()


def report_reward(trainer: RayPPOTrainer) -> None:
    """Log the result of ``try_reward``, before any model loads; raises as it and ``try_reset`` do."""
    if not runs_on_ray(trainer.config):  # else environments may be on other machines
        try_reset(trainer)
    found, warning = try_reward(trainer, is_check=False)
    if found is not None:
        scores = "; ".join(f"{one.response!r:.60} scores {one.in_words():.60}" for one in found.tried)
        logger.info("reward of the first row: %s", scores)
    if warning:
        logger.warning("warning: %s", warning)


def _require_scorers(trainer: RayPPOTrainer) -> None:
    """Check that every row can be scored, and start the scoring processes.

    Raises:
        RewardError: a ``data_source`` without a scorer.
        DataError: a row without the column or the value that its scorer needs.
    """
    has_reward_model = trainer.config.reward_model.enable
    of_loaders = (
        (trainer.reward_fn, trainer.train_loader, has_reward_model),
        (trainer.val_reward_fn, trainer.val_loader, trainer.validates_by_model),
    )
    used = [
        (reward_fn, loader.dataset, by_model)
        for reward_fn, loader, by_model in of_loaders
        if loader is not None
    ]
    of_the_run = set().union(*(dataset.data_sources() for _, dataset, _ in used))

    def require_scored(reward_fn: Reward, dataset: RowDataset, by_model: bool) -> None:
        sources = dataset.data_sources()
        try:
            reward_fn.validate_sources(sources, has_reward_model=has_reward_model, elsewhere=of_the_run)
        except UnknownSourceError:
            if isinstance(dataset, RLHFDataset):
                dataset.require_sources()
            raise
        silent = trainer.environments.without_rewards if trainer.environments is not None else ()
        for name in filter(None, silent):  # of several by name; a single one has all rows
            if isinstance(dataset, RLHFDataset) and isinstance(reward_fn, RewardManager):
                own = dataset.data_sources(name)
                try:
                    reward_fn.require_scored(own, has_reward_model=by_model, by_environment=False)
                except RewardError as error:
                    raise RewardError(
                        f"rows of the environment {name!r}, which has no reward: {error}"
                    ) from error
        by_source = trainer.config.teacher.by_source
        if missing := sorted(sources - by_source.keys() if by_source and dataset is rows_of_training else ()):
            raise ConfigError(
                f"teacher.by_source: no teacher for the data_source {', '.join(missing)}; it has "
                f"{', '.join(by_source)}"
            )
        if len(dataset):
            columns = columns_of(dataset, 0).keys() - {"input_ids"}
            for called in filter(None, (trainer.environments, trainer.program)):
                called.require_columns(columns)
            reward_fn.require_columns(columns)
            reward_fn.warn_without_ground_truths(
                columns_of(dataset, row) for row in range(min(len(dataset), _ROWS_WITH_ANSWERS))
            )
        if isinstance(dataset, RLHFDataset):
            by_rule = {source for source in sources if reward_fn.is_built_in(source)}
            dataset.require_ground_truths(by_rule, by_model=by_model)

    train_loader = trainer.train_loader
    rows_of_training = None if train_loader is None else all_rows(train_loader.dataset)
    attempt = Attempts()
    for reward_fn, dataset, by_model in used:
        attempt(partial(require_scored, reward_fn, all_rows(dataset), by_model))
        attempt(reward_fn.start)
    attempt.raise_errors()

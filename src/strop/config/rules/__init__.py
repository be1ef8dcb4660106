"""The rules between keys, each a generator of findings about one matter; `check` runs them all."""

from __future__ import annotations

from strop.config.rules import generation, inputs, learning, named, processes, reward_models
from strop.config.rules.finding import Rule

ALL_RULES: tuple[Rule, ...] = (
    named.pluggable_names,
    named.trackers,
    named.reward_parts,
    learning.groups,
    learning.kl,
    learning.sampling,
    learning.validation_sampling,
    learning.schedules,
    learning.critic_warmup,
    learning.kl_horizon,
    learning.dual_clip,
    generation.tensor_parallelism,
    generation.batches,
    generation.precision,
    processes.worker_group,
    processes.placement,
    processes.without_effect,
    processes.hybrid_sharding,
    processes.shared_sequences,
    processes.restarts,
    inputs.data_files,
    inputs.models,
    inputs.tokenizer,
    inputs.context_window,
    inputs.custom_reward,
    inputs.resume,
    inputs.run_folder,
    reward_models.input_tokenizer,
    reward_models.shared_vocabulary,
    reward_models.context_window,
    reward_models.longest_sequence,
)

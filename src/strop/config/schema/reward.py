"""Keys under `reward_model` and `custom_reward_function`: where scores come from."""

from __future__ import annotations

from typing import Any

from strop.config.schema.base import Count, Fraction, Number, PositiveFloat, PositiveInt, Section


class RewardFsdpConfig(Section):
    """Sharding of the reward model."""

    min_num_params: Count
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""


class RewardModelModelConfig(Section):
    """The sequence classifier that scores responses."""

    input_tokenizer: str | None
    """Tokenizer of the policy, when the reward model's chat template differs; null: they share one."""
    path: str
    """Model for AutoModelForSequenceClassification: folder, name, hdfs:// or any fsspec URL."""
    external_lib: str | list[str] | None
    """Package, or list of packages, to import first."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    fsdp_config: RewardFsdpConfig


class RewardModelConfig(Section):
    """The reward model (only with enable), and the reward manager (always)."""

    enable: bool
    """Score with a model as well; False: with functions only, and the model's keys have no effect."""
    model: RewardModelModelConfig
    micro_batch_size: PositiveInt | None
    """Deprecated: micro_batch_size_per_gpu times the number of ranks."""
    micro_batch_size_per_gpu: PositiveInt | None
    """Sequences that the model scores in one forward pass, per rank; memory only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens (forward_max_token_len_per_gpu) instead of by sequences."""
    forward_max_token_len_per_gpu: PositiveInt
    """Most tokens in one forward pass, per rank, with use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt
    """Neighbouring ranks that share each sequence; needs use_remove_padding of actor_rollout_ref.model."""
    max_length: PositiveInt | None
    """With input_tokenizer: longest sequence in the reward model's own tokens, its end is kept; null: any."""
    reward_manager: str
    """naive (one process), prime (num_workers processes at once), or the import path of your own."""
    num_workers: PositiveInt | None
    """Processes that prime scores with, on the driver's machine; null: as many as its cores, at most 16."""
    reward_kwargs: dict[str, Any]
    """Further keyword arguments of the reward manager."""
    timeout_s: PositiveFloat
    """Seconds that a reward function may take for one sample before it is cut off."""
    error_score: Number
    """Score of a sample whose reward function failed or was cut off."""
    max_error_rate: Fraction
    """Share of such samples in a batch above which the run stops."""
    parts: dict[str, Any]
    """What a score is made of: name of a part -> weight, or {weight, scorer, kwargs}; see docs/rewards.md."""
    non_stop_penalty: bool
    """Give a response that did not end by its stop token the score penalty_reward_value."""
    penalty_reward_value: Number
    """That score."""
    min_response_length: Count
    """With non_stop_penalty: a response that stopped before this many tokens gets that score, too."""
    num_examine: Count
    """Training samples per data source to print with their score, each iteration."""
    val_num_examine: Count
    """Validation samples per data source to print with their score."""


class CustomRewardFunctionConfig(Section):
    """Your own reward function: compute_score(data_source, solution_str, ground_truth, extra_info=None)."""

    path: str | None
    """Python file that holds it; null: the built-in scorers, by data source."""
    name: str
    """Name of the function in that file."""

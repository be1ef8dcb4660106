"""Keys under `reward_model` and `custom_reward_function`: the sources of scores."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from strop.config.schema.base import (
    FILES,
    MAY_CHANGE,
    SAME,
    Count,
    Fraction,
    Modules,
    NonNegativeFloat,
    Number,
    PositiveInt,
    Processes,
    Required,
    Seconds,
    Section,
    SharedSequences,
    Text,
    by_rows,
    by_tokens,
    engine_sections,
    no_effect,
)

_NO_MODEL = no_effect("with reward_model.enable=False", lambda at: not at.config.reward_model.enable)

_NO_PENALTY = no_effect(
    "with reward_model.non_stop_penalty=False", lambda at: not at.section.non_stop_penalty
)


@engine_sections("reward_model.model")
class RewardModelModelConfig(Section, resumes=SAME):
    """The sequence classifier that scores responses."""

    input_tokenizer: Annotated[str | None, FILES]
    """Tokenizer of the policy, when the reward model's chat template differs; null: they share one."""
    path: Annotated[
        str,
        FILES,
        Required(
            "a sequence classifier",
            "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
            applies=lambda at: at.config.reward_model.enable,
            when="with reward_model.enable",
        ),
    ]
    """Model for AutoModelForSequenceClassification: folder, name, hdfs:// or any fsspec URL."""
    external_lib: Annotated[Modules, MAY_CHANGE]
    """Package, or list of packages, to import first."""
    trust_remote_code: Annotated[bool, MAY_CHANGE]
    """Run Python code that comes with the model."""


_NO_JUDGE = no_effect("with reward_model.judge.url=null", lambda at: at.config.reward_model.judge.url is None)


class JudgeConfig(Section, resumes=SAME):
    """A language model on a server that rates responses: the part `judge` of the score."""

    url: Annotated[Text | None, MAY_CHANGE]
    """Server with OpenAI's chat completions, as http://127.0.0.1:8000; null: no judge."""
    token_env: Annotated[Text | None, MAY_CHANGE, _NO_JUDGE]
    """Environment variable with the server's key; needed beyond this machine."""
    model: Annotated[Text | None, _NO_JUDGE]
    """Name of the model there; null: the first one that the server names."""
    rubric: Annotated[Text | None, FILES, _NO_JUDGE]
    """Text, or a file, with {prompt}, {response} and {ground_truth}; null: the one of strop docs rewards."""
    scale: Annotated[list[Number], Field(min_length=2, max_length=2), _NO_JUDGE]
    """Lowest and highest number that it may give, mapped to 0 and 1; the last number of its answer counts."""
    temperature: Annotated[NonNegativeFloat | None, _NO_JUDGE]
    """Temperature of its answers, 0: greedy; null: its own, of services that take no other."""


@engine_sections("reward_model", _NO_MODEL)
class RewardModelConfig(Section, resumes=SAME):
    """The reward model (only with enable), and the reward manager (always)."""

    enable: bool
    """Score with a model as well; False: with functions only."""
    model: Annotated[RewardModelModelConfig, _NO_MODEL]
    micro_batch_size: Annotated[PositiveInt | None, MAY_CHANGE, _NO_MODEL]
    """Deprecated: micro_batch_size_per_gpu times the number of ranks."""
    micro_batch_size_per_gpu: Annotated[PositiveInt | None, MAY_CHANGE, _NO_MODEL, by_rows()]
    """Sequences that the model scores in one forward pass, per rank; memory only."""
    use_dynamic_bsz: Annotated[bool, MAY_CHANGE, _NO_MODEL]
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    forward_max_token_len_per_gpu: Annotated[PositiveInt | None, MAY_CHANGE, _NO_MODEL, by_tokens()]
    """Most tokens in one forward pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    ulysses_sequence_parallel_size: Annotated[SharedSequences, MAY_CHANGE, _NO_MODEL]
    """Neighbouring ranks that share each sequence; needs use_remove_padding of actor_rollout_ref.model."""
    max_length: Annotated[
        PositiveInt | None,
        MAY_CHANGE,
        _NO_MODEL,
        no_effect(
            "with reward_model.model.input_tokenizer=null",
            lambda at: at.section.model.input_tokenizer is None,
            "the reward model reads the policy's tokens as they are",
        ),
    ]
    """With input_tokenizer: longest sequence in the reward model's tokens; its end is kept; null: any."""
    judge: JudgeConfig
    sees: Annotated[bool, _NO_MODEL]
    """Score samples with their pictures; False: with the words [picture] in their places."""
    reward_manager: str
    """naive (one process), prime (num_workers processes), none (a teacher alone), or an import path."""
    num_workers: Annotated[
        Processes | None,
        MAY_CHANGE,
        no_effect(
            "without reward_model.reward_manager=prime",
            lambda at: at.section.reward_manager != "prime",
            "only the prime reward manager has several processes",
        ),
    ]
    """Scoring processes of prime, on the driver's machine; null: one for each core, at most 16."""
    reward_kwargs: dict[str, Any]
    """Further keyword arguments of the reward manager."""
    timeout_s: Annotated[Seconds, MAY_CHANGE]
    """Seconds that a reward function may take for one sample before it is cut off."""
    error_score: Annotated[Number, MAY_CHANGE]
    """Score of a sample whose reward failed, was cut off or is not finite; see strop docs rewards."""
    max_error_rate: Annotated[Fraction, MAY_CHANGE]
    """Share of such samples, among the last 256 or a larger batch, above which the run stops."""
    memory_limit_mb: Annotated[PositiveInt | None, MAY_CHANGE]
    """Limit of a scoring process's private memory, and of each that it starts, in MiB; null: none."""
    max_concurrency: Annotated[PositiveInt, MAY_CHANGE]
    """Samples that an async reward function scores at the same time, in one process."""
    parts: dict[str, Any]
    """Terms of a score: name of a part -> weight, or {weight, scorer, kwargs}; see strop docs rewards."""
    non_stop_penalty: bool
    """Give a response that did not end with a stop token the score penalty_reward_value."""
    penalty_reward_value: Annotated[Number, _NO_PENALTY]
    """Score of such a response."""
    min_response_length: Annotated[Count, _NO_PENALTY]
    """Responses that stopped before this many tokens get that score, too."""
    num_examine: Annotated[Count, MAY_CHANGE]
    """Training samples per data source to log with their score, each iteration."""
    val_num_examine: Annotated[Count, MAY_CHANGE]
    """Validation samples per data source to log with their score, in the first and the last validation."""


class CustomRewardFunctionConfig(Section, resumes=SAME):
    """Your own reward function: compute_score(response, ground_truth, ...); see strop docs rewards."""

    path: Annotated[str | None, FILES]
    """Python file that defines it; null: the built-in scorers, by data source."""
    name: Annotated[
        str, no_effect("with custom_reward_function.path=null", lambda at: at.section.path is None)
    ]
    """Name of the function in that file."""

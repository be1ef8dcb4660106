"""Forecast of the memory that a run needs on one rank, and of its samples on disk, computed from shapes.

The back-ends forecast what they hold (``EngineKind.bytes``, ``RolloutKind.bytes``). Roles in separate pools
are counted as if they shared one.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.backends import ROLLOUTS, Forecast, total
from strop.config.batch_plan import BatchPlan, ForwardPlan, MicroBatchSize, engine_of, sequences_of_a_row
from strop.config.keys import longest_row
from strop.config.memory.facts import ModelFacts, read_model_facts
from strop.config.memory.shapes import FLOAT32, PictureBytes, activations, encoder, logits, number_bytes
from strop.config.placement import Placement, process_count, uses_gpu
from strop.config.roles import (
    has_kl_in_reward,
    loads_policy,
    reason_for_old_log_prob_pass,
    reference_is_the_actor,
    teacher_hidden,
    teacher_is_the_actor,
    teacher_models,
    uses_critic,
    uses_full_kl,
    uses_reference,
    uses_teacher,
)
from strop.config.schema import Config, RootConfig
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import RewardModellingConfig, SftConfig, SupervisedConfig
from strop.config.schema.teacher import THE_POLICY


def forecast(
    config: Config, plan: BatchPlan, *, pool: str | None = None, pictures: PictureBytes | None = None
) -> Forecast:
    """Return the memory of one rank, from config.json and the headers of the weights alone.

    ``pool``: of the roles in this pool; None: of all roles, as if they shared one. ``pictures``: of the data
    sets, where these have been read.
    """
    trainer = trainer_forecast(config, plan, pool=pool, pictures=pictures)
    placement = Placement.from_config(config)
    if pool not in (None, placement.roles[placement.rollout_role]):
        return trainer
    generation = rollout_forecast(config, plan)
    return Forecast(trainer.resident | generation.resident, trainer.phases | generation.phases)


def rollout_forecast(config: Config, plan: BatchPlan) -> Forecast:
    """Return the memory of one rank of the rollout."""
    facts, name = read_model_facts(config.actor_rollout_ref.model.path), config.actor_rollout_ref.rollout.name
    return ROLLOUTS[name].bytes(config, plan.samples // plan.ranks, facts)


def trainer_forecast(
    config: Config, plan: BatchPlan, *, pool: str | None = None, pictures: PictureBytes | None = None
) -> Forecast:
    """Return the memory of one rank without that of the rollout."""
    length, phases = longest_row(config.data)[0], {}
    if _is_in(config, "actor", pool):
        tokens = _tokens_at_once(plan.actor, length, plan.actor.sharing)
        model, pixels = config.actor_rollout_ref.model, _pixels(pictures, tokens, length)
        size = _update(config, "actor", model, tokens, has_logits=True, pixels=pixels)
        phases["actor update: activations, logits"] = size
    if plan.critic is not None and _is_in(config, "critic", pool):
        tokens = _tokens_at_once(plan.critic, length, plan.critic.sharing)
        pixels = _pixels(pictures, tokens, length)
        size = _update(config, "critic", config.critic.model, tokens, has_logits=False, pixels=pixels)
        phases["critic update: activations"] = size
    resident = resident_weights(config, pool) | _held(pictures)
    if not uses_gpu(config) and _is_in(config, "actor", pool):  # the driver shares the memory of a CPU
        size = hidden_columns(config, plan.samples)
        resident |= {"samples: hidden states, likeliest words": size} if size else {}
    return Forecast(resident, phases)


def hidden_columns(config: Config, samples: int) -> int:
    """Return the bytes that the driver holds of hidden states and of the likeliest words of samples."""
    teacher, widths = config.teacher, [0]
    if teacher_hidden(config):
        widths = [0 if facts is None else facts.hidden for facts in map(read_model_facts, teachers(config))]
    numbers = max(widths, default=0)
    if uses_teacher(config) and teacher.top_k is not None:
        numbers += 2 * teacher.top_k + 1
    if uses_full_kl(config):
        facts = read_model_facts(config.actor_rollout_ref.model.path)
        numbers += 0 if facts is None else facts.hidden
    return samples * config.data.max_response_length * FLOAT32 * numbers


def teachers(config: Config) -> list[str]:
    """Return the path of each teacher in this run's processes."""
    if teacher_is_the_actor(config):
        return [config.actor_rollout_ref.model.path]
    return [model.path for model in teacher_models(config).values()]


def resident_weights(config: Config, pool: str | None = None) -> dict[str, int | None]:
    """Return the bytes of one rank's models of ``pool`` (None: of all), with what their training keeps."""
    trains, policy = not config.trainer.val_only, config.actor_rollout_ref.model.path
    kept = "weights, gradients, AdamW" if trains else "weights"
    models = [("actor", f"actor: {kept}", policy, trains)] if loads_policy(config) else []
    if uses_reference(config) and not reference_is_the_actor(config):
        models.append(("ref", "reference: weights", policy, False))
    if uses_critic(config):
        models.append(("critic", f"critic: {kept}", config.critic.model.path, True))
    taught_by = teacher_models(config)
    for key, model in taught_by.items():
        name = key.removesuffix(".model").removeprefix("teacher.by_source.")
        words = "teacher: weights" if len(taught_by) == 1 else f"teacher {name}: weights"
        models.append(("teacher", words, model.path, False))
    if config.reward_model.enable:
        models.append(("reward_model", "reward model: weights", config.reward_model.model.path, False))
    held = {
        words: engine_of(config, name).bytes(config, name, read_model_facts(path), trains=is_trained)
        for name, words, path, is_trained in models
        if _is_in(config, name, pool)
    }
    if teacher_hidden(config) and _is_in(config, "actor", pool):
        student = config.actor_rollout_ref.model
        layers = [_layer(read_model_facts(path), student) for path in teachers(config)]
        held["teacher: output layer beside the actor"] = total(*layers)
    return held


def supervised_forecast(config: SupervisedConfig, pictures: PictureBytes | None = None) -> Forecast:
    """Return the memory of one rank of a supervised run; empty with an engine that runs none (an error).

    ``pictures``: of the data sets, where these have been read.
    """
    if "supervised" not in engine_of(config, "update").offers:
        return Forecast({}, {})
    update, length, sequences = config.update, longest_row(config.data)[0], sequences_of_a_row(config)
    rows = -(-config.data.train_batch_size // process_count(config)) * sequences
    if update.use_dynamic_bsz:
        size = MicroBatchSize(max_tokens=update.max_token_len_per_gpu)
    else:
        size = MicroBatchSize(rows=(update.micro_batch_size_per_gpu or rows) * sequences)
    tokens = _tokens_at_once(ForwardPlan(rows, size), length)
    has_logits = not isinstance(config, RewardModellingConfig)
    facts = read_model_facts(config.model.path)
    held = engine_of(config, "update").bytes(config, "update", facts, trains=True)
    pixels = _pixels(pictures, tokens, length)
    size_of_pass = _update(config, "update", config.model, tokens, has_logits=has_logits, pixels=pixels)
    models = {"model: weights, gradients, AdamW": held, **_held(pictures)}
    if isinstance(config, SftConfig) and uses_teacher(config):
        own = config.teacher.model.path == THE_POLICY
        facts = facts if own else read_model_facts(config.teacher.model.path)
        if not own:
            models["teacher: weights"] = engine_of(config, "update").bytes(
                config, "teacher", facts, trains=False
            )
        if config.teacher.top_k is None:
            models["teacher: output layer beside the model"] = _layer(facts, config.model)
    return Forecast(models, {"update: activations, logits": size_of_pass})


def _layer(facts: ModelFacts | None, policy: ModelConfig) -> int | None:
    """Return the bytes of a teacher's output layer, which stands whole where the policy is."""
    return None if facts is None else facts.vocabulary * facts.hidden * number_bytes(policy)


def _update(
    config: RootConfig, name: str, model: ModelConfig, tokens: int, *, has_logits: bool, pixels: int = 0
) -> int | None:
    """Return the bytes of an update's passes over ``tokens``, beside the model and its optimizer.

    ``pixels``: bytes of a pass's pictures.
    """
    facts = read_model_facts(model.path)
    whole = engine_of(config, name).update_bytes(config, name, facts, model)
    own = activations(facts, tokens, model), logits(facts, tokens) if has_logits else 0, whole
    return total(*own, encoder(facts, pixels, model))


def _pixels(pictures: PictureBytes | None, tokens: int, length: int) -> int:
    """Return the bytes of the pixels of a pass over rows of ``length`` tokens."""
    return 0 if pictures is None else pictures.row * max(tokens // length, 1)


def _held(pictures: PictureBytes | None) -> dict[str, int | None]:
    return {} if pictures is None else {"pictures: files, processed pixels": pictures.held}


def _is_in(config: Config, name: str, pool: str | None) -> bool:
    """Return True if the model of the pass ``name`` is in ``pool``."""
    return pool is None or Placement.from_config(config).pool_of_pass(name) == pool


def _tokens_at_once(part: ForwardPlan, length: int, sharing: int = 1) -> int:
    rows, all_tokens = part.micro_batch.rows, part.samples_per_rank * length
    tokens = min(all_tokens, part.micro_batch.max_tokens or all_tokens if rows is None else rows * length)
    return -(-tokens // sharing)


# Bytes of a token in a file of samples, compressed; `strop.columns.TOKEN_COLUMNS` has the significant bits.
_ID_AND_TEXT = 3.0
_16_BITS = 2.4
_11_BITS = 1.8


@dataclass(frozen=True)
class SampleFiles:
    """Disk space of rollouts/."""

    file: int
    """Bytes of one iteration, at full prompts and responses."""
    files: int | None
    """Files that are kept; None if their number is not limited and that of the iterations is unknown."""


def sample_files(config: Config, plan: BatchPlan) -> SampleFiles:
    """Estimate the disk space of rollouts/ (trainer.log_rollouts).

    The bytes of a number were measured on numbers without structure. One that is equal for a whole response
    takes nothing: advantages and returns without values and KL penalty.
    """
    columns = 2 * _16_BITS + _11_BITS  # log-probs of sampler and policy, entropies
    if reason_for_old_log_prob_pass(config):
        columns += _16_BITS  # log-probs in the update
    if uses_reference(config):
        columns += _16_BITS
    if uses_teacher(config):
        columns += _16_BITS
    if has_kl_in_reward(config):
        columns += _16_BITS
    if has_kl_in_reward(config) or uses_critic(config):
        columns += 2 * _11_BITS
    if uses_critic(config):
        columns += _11_BITS
    data, settings = config.data, config.trainer
    tokens = data.max_prompt_length + data.max_response_length
    sample = tokens * _ID_AND_TEXT + data.max_response_length * columns
    files = [] if plan.iterations is None else [-(-plan.iterations // settings.log_rollouts_freq)]
    files += [] if settings.rollouts_to_keep is None else [settings.rollouts_to_keep]
    return SampleFiles(round(plan.samples * sample), min(files, default=None))

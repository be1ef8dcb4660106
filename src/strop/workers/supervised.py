"""Workers of the supervised trainers: ``SftWorker``, ``RewardModellingWorker`` and ``PreferenceWorker``.

Each holds one model and takes one optimizer step per batch.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strop.algorithms.aggregation import masked_sum
from strop.algorithms.preference import (
    REFERENCE_INPUTS,
    PreferenceLossFunction,
    bradley_terry_loss,
    centering_loss,
    pairwise_accuracy,
)
from strop.algorithms.registry import call
from strop.config.backends import ENGINES
from strop.config.batch_plan import SUPERVISED_MICRO_BATCH, sequences_of_a_row
from strop.config.checks.supervised import Supervised
from strop.config.keys import value_at
from strop.config.roles import uses_teacher
from strop.config.schema.supervised import (
    PreferenceConfig,
    RewardModellingConfig,
    SftConfig,
)
from strop.config.schema.teacher import THE_POLICY
from strop.controller.group import Dispatch, register
from strop.engines.base import Engine, Loss
from strop.engines.micro_batches import MicroBatching
from strop.models.folder import words_of
from strop.models.scorer import REWARD_MEAN, REWARD_STD
from strop.models.teaching import Teaching
from strop.protocol import DataProto
from strop.workers.base import Worker, options_of
from strop.workers.losses import pair_figures, preference_loss
from strop.workers.memory import phase
from strop.workers.teacher import teacher_columns


class SupervisedWorker(Worker[Supervised]):
    """One process of a supervised run."""

    def load(self, kind: Any, **spec: Any) -> None:
        """Load the tokenizer, which is saved with the model, and build the engine."""
        self.load_tokenizer()
        self.engine = self.build(kind, **spec)

    def load_tokenizer(self) -> None:
        """Load the tokenizer, which is saved with the model."""
        model = self.config.model
        self.merges_export = model.lora_merge
        self.tokenizer = self.load_tokenizer_from(
            self.config.data.tokenizer or model.path, trust_remote_code=model.trust_remote_code
        )

    def build(self, kind: Any, **spec: Any) -> Engine:
        """Build the engine of the trained model; ``spec`` may name another model and its section."""
        model, update = self.config.model, self.config.update
        options: dict[str, Any] = {
            "model": self.model_options(model),
            "strategy": update.strategy,
            "section": ENGINES[update.strategy].section_of(self.config, "update"),
            **options_of(model, "model", trained=update),
            "lora": self.adapters_of(model, "model"),
        }
        return self.engine_of(kind, **(options | spec))

    @property
    def micro_batching(self) -> MicroBatching:
        """Micro-batch size on this rank; a row of several sequences counts the tokens of all."""
        update = self.config.update
        if not update.use_dynamic_bsz:
            return MicroBatching(rows=update.micro_batch_size_per_gpu)
        cap = value_at(self.config, SUPERVISED_MICRO_BATCH.max_tokens)
        # a row's mask covers the longer answer, and both are computed
        return MicroBatching(max_tokens=cap // sequences_of_a_row(self.config))


class SftWorker(SupervisedWorker[SftConfig]):
    """Supervised fine-tuning: raises the probability of given responses, token by token.

    With a teacher it learns its distributions at the tokens of these responses.
    """

    teacher: Engine | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the language model, and the teacher."""
        section, spec = self.config.teacher, {}
        self.load_tokenizer()
        if uses_teacher(self.config):
            own, policy = section.model.path == THE_POLICY, self.config.model.path
            self.words = words_of(self.tokenizer, [policy] if own else [policy, section.model.path])
            whole = section.top_k is None
            spec["keeps_reference_head"] = own and whole
            options = self.model_options(section.model)
            models = [options] if whole and not own else []
            spec["teaching"] = Teaching(
                kind=section.kl, js_weight=section.js_weight, words=self.words, models=models
            )
        self.engine = self.build("policy", **spec)
        if spec and own:
            self.teacher = self.engine
        elif spec:
            frozen = ENGINES[self.config.update.strategy].section_of(self.config, "teacher")
            self.teacher = self.build(
                "policy", model=options, section=frozen, trained=None, freeze=None, lora=None, role="teacher"
            )

    @register(Dispatch.DATA_PARALLEL)
    @phase("update")
    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on a batch whose ``meta_info`` has ``n_tokens`` over all ranks."""
        n_tokens, update, section = batch.meta_info["n_tokens"], self.config.update, self.config.teacher
        if self.teacher is None:
            objective = response_objective(n_tokens=n_tokens)
            return self.train_on(batch, objective, update, self.micro_batching, with_entropy=False)
        with self.teacher.base_model():
            found = teacher_columns(
                self.teacher, batch, micro=self.micro_batching, teacher=section, words=self.words
            )
        objective = response_objective(n_tokens=n_tokens, nll_coef=update.nll_coef, teacher_coef=section.coef)
        options = {"with_entropy": False, "with_teacher": True}
        return self.train_on(batch.union(found), objective, update, self.micro_batching, **options)

    @register(Dispatch.DATA_PARALLEL)
    @phase("testing")
    def evaluate(self, batch: DataProto) -> DataProto:
        """Return ``log_prob`` [B] of each whole response."""
        log_prob_BT = self.engine.infer(batch, self.micro_batching, with_entropy=False)["log_prob"]
        return DataProto({"log_prob": log_prob_BT.sum(dim=1)})


def response_objective(*, n_tokens: float, nll_coef: float = 1.0, teacher_coef: float | None = None) -> Loss:
    """Return the mean negative log-likelihood of the response tokens of a whole batch.

    With a ``teacher_coef``: ``nll_coef`` times that, plus ``teacher_coef`` times their mean divergence from
    the teacher.
    """

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT = columns["response_mask"]
        nll = -masked_sum(outputs["log_prob"], mask_BT) / n_tokens
        if teacher_coef is None:
            return nll, {}
        kl, agreement = (
            masked_sum(outputs[f"teacher_{name}"], mask_BT) / n_tokens for name in ("kl", "agrees")
        )
        total = teacher_coef * kl
        if nll_coef:  # at 0, skip the backward pass through the vocabulary
            total = total + nll_coef * nll
        return total, {"nll": nll, "teacher_kl": kl, "teacher_agreement": agreement}

    return objective


class RewardModellingWorker(SupervisedWorker[RewardModellingConfig]):
    """Reward modelling: a model with a scalar head learns to score chosen answers above rejected ones."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; a language model gets a new score head, drawn from ``trainer.seed``."""
        self.load("pairs", head_seed=self.config.trainer.seed)
        # Transformers finds the last token of a sequence by this id when it loads the exported folder.
        self.engine.set_config({"pad_token_id": self.tokenizer.pad_token_id})
        self.calibrate(None, None)  # the model may be a calibrated reward model that is trained further

    @register(Dispatch.DATA_PARALLEL)
    @phase("update")
    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on a batch whose ``meta_info`` has ``n_pairs`` over all ranks."""
        self.calibrate(None, None)
        update = self.config.update
        objective = pair_objective(
            n_pairs=batch.meta_info["n_pairs"], center_coefficient=update.center_rewards_coefficient
        )
        return self.train_on(batch, objective, update, self.micro_batching)

    @register(Dispatch.DATA_PARALLEL)
    @phase("testing")
    def evaluate(self, batch: DataProto) -> DataProto:
        """Return the head's ``chosen_scores`` and ``rejected_scores``, [B] each."""
        return DataProto(self.engine.infer(batch, self.micro_batching))

    @register(Dispatch.ONE_TO_ALL)
    def calibrate(self, mean: float | None, std: float | None) -> None:
        """Set mean and standard deviation of the scores in the exported configuration; None: unknown.

        The next update removes them, as they no longer fit the model.
        """
        self.engine.set_config({REWARD_MEAN: mean, REWARD_STD: std})


def pair_objective(*, n_pairs: float, center_coefficient: float) -> Loss:
    """Return the mean Bradley-Terry loss of a whole batch, plus the centering term.

    A row without response tokens is padding and contributes nothing.
    """

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_B, rejected_B = outputs["chosen_scores"], outputs["rejected_scores"]
        is_pair_B = columns["response_mask"].any(dim=1)

        def mean(figure_B: Tensor) -> Tensor:
            return (figure_B * is_pair_B).sum() / n_pairs

        loss = mean(bradley_terry_loss(chosen_B, rejected_B))
        if center_coefficient:
            loss = loss + center_coefficient * mean(centering_loss(chosen_B, rejected_B))
        margin_B = (chosen_B - rejected_B).detach()
        return loss, {
            "accuracy": mean(pairwise_accuracy(margin_B)),
            "margin": mean(margin_B),
            "chosen_score": mean(chosen_B),
            "rejected_score": mean(rejected_B),
        }

    return objective


class PreferenceWorker(SupervisedWorker[PreferenceConfig]):
    """Preference optimization: a policy learns to prefer chosen answers to rejected ones."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the language model."""
        self.load("policy_pairs")

    @register(Dispatch.DATA_PARALLEL)
    @phase("update")
    def update(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step on a batch whose ``meta_info`` has ``n_pairs`` and ``n_tokens``."""
        update = self.config.update
        objective = preference_objective(
            preference_loss(update),
            n_pairs=batch.meta_info["n_pairs"],
            n_tokens=batch.meta_info["n_tokens"],
            nll_coef=update.nll_coef,
        )
        return self.train_on(batch, objective, update, self.micro_batching)

    @register(Dispatch.DATA_PARALLEL)
    @phase("testing")
    def evaluate(self, batch: DataProto) -> DataProto:
        """Return ``chosen_log_prob`` and ``rejected_log_prob``, [B] each, of the current model."""
        return DataProto(self.engine.infer(batch, self.micro_batching))

    @register(Dispatch.DATA_PARALLEL)
    @phase("ref")
    def evaluate_reference(self, batch: DataProto) -> DataProto:
        """Return what ``evaluate`` does, of the model as loaded or, with LoRA, with its adapters off.

        Without LoRA: before the first update only.
        """
        with self.engine.base_model():
            return self.evaluate(batch)

    @register(Dispatch.ONE_TO_ALL)
    def reference_hash(self) -> str:
        """Return ``weights_hash`` of the model that ``evaluate_reference`` runs."""
        with self.engine.base_model():
            return self.weights_hash()


def preference_objective(
    preference_loss: PreferenceLossFunction, *, n_pairs: float, n_tokens: float, nll_coef: float
) -> Loss:
    """Return the mean preference loss of a whole batch, plus ``nll_coef`` times the chosen answers' loss.

    ``n_tokens`` counts the tokens of chosen answers. A row without response tokens is padding and contributes
    nothing.
    """

    def objective(
        outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        is_pair_B = columns["response_mask"].any(dim=1)
        reference = {name: columns[name] for name in REFERENCE_INPUTS if name in columns}
        lengths = {
            "chosen_length": columns["response_mask"].sum(dim=1),
            "rejected_length": columns["rejected_mask"].sum(dim=1),
        }
        # Selected, not multiplied by 0: a user's loss may be NaN for an answer without tokens.
        inputs = {name: figure_B[is_pair_B] for name, figure_B in {**outputs, **reference, **lengths}.items()}
        found = call(preference_loss, inputs)
        nll = -inputs["chosen_log_prob"].sum() / n_tokens
        loss = found.loss_B.sum() / n_pairs
        if nll_coef:
            loss = loss + nll_coef * nll
        by_pair = pair_figures(found, inputs)
        return loss, {"nll": nll, **{name: figure_B.sum() / n_pairs for name, figure_B in by_pair.items()}}

    return objective

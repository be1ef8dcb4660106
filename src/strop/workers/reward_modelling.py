"""Reward modelling's worker: a model with a scalar head that learns which of two answers is preferred."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strop.algorithms.preference import bradley_terry_loss, centering_loss, pairwise_accuracy
from strop.config.schema.supervised import RewardModellingConfig
from strop.controller.group import Dispatch, register
from strop.engines.base import Loss
from strop.models.deferred import defer_scorer
from strop.models.loader import load_scorer
from strop.models.scorer import REWARD_MEAN, REWARD_STD, PairScorer
from strop.protocol import DataProto
from strop.workers.supervised import SupervisedWorker


class RewardModellingWorker(SupervisedWorker[RewardModellingConfig]):
    """Scores the chosen answers above the rejected ones."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; a language model gets a fresh score head, drawn from ``trainer.seed``."""
        options = self.model_options(self.config.model)
        options["fresh_head_seed"] = self.config.trainer.seed
        self.tokenizer = self.load_own_tokenizer()
        model, weights = defer_scorer(**options) if self.sharded else (load_scorer(**options), None)
        # Whoever loads the exported folder by transformers alone looks for the last token by this.
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self._model_config = model.config
        self.calibrate(None, None)  # of a reward model that is trained further
        module = PairScorer(model, packed=self.config.model.use_remove_padding)
        self.engine = self.build_trained_engine(module, weights)

    @register(Dispatch.DATA_PARALLEL)
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on a batch whose ``meta_info`` has ``n_pairs``, counted over all ranks."""
        self.calibrate(None, None)
        update = self.config.update
        objective = pair_objective(
            n_pairs=batch.meta_info["n_pairs"], center_coefficient=update.center_rewards_coefficient
        )
        return self.train_on(batch, objective, update, self.micro_batching)

    @register(Dispatch.DATA_PARALLEL)
    def evaluate(self, batch: DataProto) -> DataProto:
        """``chosen_scores`` and ``rejected_scores``, [B] each, as the head gives them."""
        return DataProto(self.engine.infer(batch, self.micro_batching))

    @register(Dispatch.ONE_TO_ALL)
    def calibrate(self, mean: float | None, std: float | None) -> None:
        """Note mean and standard deviation of the scores in the model's configuration; None: not known.

        They are exported with it. The next update forgets them: they were another model's.
        """
        for name, value in ((REWARD_MEAN, mean), (REWARD_STD, std)):
            if value is not None:
                setattr(self._model_config, name, value)
            elif hasattr(self._model_config, name):
                delattr(self._model_config, name)


def pair_objective(*, n_pairs: float, center_coefficient: float) -> Loss:
    """The mean Bradley-Terry loss of a whole batch, with the centering term.

    A row without response tokens is padding, and counts for nothing.
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

"""Names that loops written for verl use: parts of ``RayPPOTrainer``, and the arithmetic on a batch.

Here are names of Python programs (``strop docs from_verl``); those of configuration keys are in
``strop.config.verl``, which imports no torch. Shapes: B samples, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from strop.algorithms import kl, policy_loss
from strop.algorithms.advantages import estimate_columns, get_estimator
from strop.algorithms.aggregation import masked_mean
from strop.data.build import build_loaders
from strop.data.loader import PromptLoader
from strop.errors import ConfigError
from strop.protocol import DataProto

if TYPE_CHECKING:
    from torch import Tensor


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Add ``token_level_rewards`` [B, T] to the batch, score_t - beta kl_t; then update ``kl_ctrl``.

    Reads ``token_level_scores``, ``response_mask``, ``old_log_probs`` and ``ref_log_prob``, or ``full_kl``,
    which with a coefficient of 0 may be absent: the rewards are then the scores.
    Return the batch, and the metrics ``critic/kl`` and ``critic/kl_coeff``.
    """
    columns, mask_BT, beta = data.batch, data.batch["response_mask"], kl_ctrl.value
    if beta == 0 and not {"ref_log_prob", "full_kl"} & columns.keys():  # the run has no reference
        kl_BT = torch.zeros_like(mask_BT)
    elif kl_penalty == "full":
        kl_BT = columns["full_kl"]
    else:
        kl_BT = kl.kl_penalty(columns["old_log_probs"], columns["ref_log_prob"], kl_penalty, mask_BT)
    columns["token_level_rewards"] = kl.apply_kl_penalty(columns["token_level_scores"], kl_BT, mask_BT, beta)
    mean_kl = kl.mean_sequence_kl(kl_BT, mask_BT).item()
    kl_ctrl.update(mean_kl, len(data))
    return data, {"critic/kl": mean_kl, "critic/kl_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    *,
    whiten: bool | None = None,
    norm_by_std: bool | None = None,
) -> DataProto:
    """Add ``advantages`` and ``returns`` [B, T] to the batch, and return it.

    Reads ``token_level_rewards``, ``response_mask``, if present ``token_level_scores`` (before the KL
    penalty), and what else the estimator takes. Groups are found by ``uid``; in a batch without it, every
    ``num_repeat`` adjacent rows are one. ``whiten`` and ``norm_by_std`` are ``algorithm.whiten_advantages``
    and ``algorithm.norm_adv_by_std_in_grpo``; None: as ``generate_sequences`` of the trainer's group has
    written them into ``meta_info``, else True.
    """
    columns, settings = data.batch, data.meta_info
    if whiten is None:
        whiten = settings.get("whiten_advantages", True)
    if norm_by_std is None:
        norm_by_std = settings.get("norm_adv_by_std_in_grpo", True)
    columns["advantages"], columns["returns"] = estimate_columns(
        get_estimator(adv_estimator),
        columns,
        data.non_tensor_batch.get("uid", [row // num_repeat for row in range(len(data))]),
        gamma=gamma,
        lam=lam,
        whiten=whiten,
        norm_by_std=norm_by_std,
    )
    return data


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    eos_mask: Tensor | None = None,
    cliprange: float = 0.2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means over the tokens [B, T]: clipped surrogate, share that is clipped, k1 of KL(old || new).

    ``eos_mask`` is the response mask; None: every token counts. Gradients flow through the first.
    """
    mask_BT = torch.ones_like(log_prob) if eos_mask is None else eos_mask
    clips = {"clip_ratio_low": cliprange, "clip_ratio_high": cliprange}
    found = policy_loss.ppo(log_prob, old_log_prob, advantages, mask_BT, **clips)
    kl_BT = (old_log_prob - log_prob).detach()
    loss, clipped, kl_mean = (masked_mean(x, mask_BT) for x in (found.loss_BT, found.clipped_BT, kl_BT))
    return loss, clipped, kl_mean


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs [...] of the tokens ``labels`` [...] under ``logits`` [..., V], float32."""
    return logits.float().log_softmax(dim=-1).gather(-1, labels[..., None]).squeeze(-1)


class OneEpoch(PromptLoader):
    """A loader of prompts whose iteration ends with the epoch."""

    def __iter__(self) -> Iterator[DataProto]:
        batches: Any = self.batches
        return islice(super().__iter__(), len(self) - batches.position)


class WholeBatches:
    """A worker group whose updates take the batch of an iteration; a group's own take one mini-batch.

    The iteration is ``trainer.global_step + 1``, which selects seeds and learning rate.
    """

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._group = trainer, getattr(trainer, name)
        if self._group is None:
            raise ConfigError(f"there is no group {name!r}: init_workers() builds those that the run needs")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate with the current weights; add the ``old_log_probs`` of the responses.

        ``rollout.n`` responses to each prompt, adjacent; one, the greedy one, with ``do_sample`` False in
        ``meta_info``.
        """
        trainer, ppo = self._trainer, self._trainer.ppo
        mode = "train" if prompts.meta_info.get("do_sample", True) else "greedy"
        seeds_PN = ppo.seeds(trainer.global_step + 1, len(prompts))
        if mode == "greedy":
            seeds_PN = seeds_PN[:, :1]
        batch = ppo.generate(prompts, seeds_PN, trainer.timer, mode=mode)
        trainer.weights.release()  # makes room for all passes and updates, as in the trainer's own step
        algorithm = trainer.config.algorithm
        for key in ("whiten_advantages", "norm_adv_by_std_in_grpo"):  # for compute_advantage
            batch.meta_info[key] = getattr(algorithm, key)
        # compute_ref_log_prob computes them with a full KL, which needs the reference's hidden states
        return batch if ppo.full_kl else batch.union(self.compute_log_prob(batch))

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` [B, T]: the sampler's with ``use_rollout_log_probs``, else the actor's."""
        if self._trainer.ppo.sampler_is_old:
            return DataProto({"old_log_probs": data.batch["rollout_log_probs"]})
        return self._group.compute_log_prob(data)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [B, T]; for a full KL also ``full_kl`` and ``old_log_probs``."""
        found = self._group.compute_ref_log_prob(data)
        if not self._trainer.ppo.full_kl:
            return found
        return found.union(self._trainer.actor.compute_log_prob(data.union(found)))

    def update_actor(self, data: DataProto) -> DataProto:
        """Take the optimizer steps of the iteration; return ``meta_info["metrics"]``."""
        trainer = self._trainer
        steps = trainer.ppo.start_actor_update(data, trainer.timer, trainer.global_step + 1, recorded=False)
        metrics, columns = steps.get()
        trainer.weights.version += 1  # the rollout gets these weights before it generates again
        return DataProto(columns.batch, {}, {"metrics": {f"actor/{name}": metrics[name] for name in metrics}})

    def update_critic(self, data: DataProto) -> DataProto:
        """Take the optimizer steps of the iteration; return ``meta_info["metrics"]``."""
        trainer = self._trainer
        steps = trainer.ppo.start_critic_update(data, trainer.timer, trainer.global_step + 1)
        metrics, _ = steps.get()
        return DataProto(meta_info={"metrics": {f"critic/{name}": metrics[name] for name in metrics}})


class VerlNames:
    """verl's names of what ``RayPPOTrainer`` has.

    ``actor_rollout_wg``, ``ref_policy_wg``, ``critic_wg`` and ``rm_wg`` are its groups (``WholeBatches``),
    ``kl_ctrl`` is the controller of the coefficient of the KL in the reward, 0 with ``actor.use_kl_loss``.
    ``train_dataloader`` iterates over what is left of an epoch, ``val_dataloader`` over the validation
    prompts. ``global_steps`` is the number of the iteration in progress, from 1; a ``fit`` of one's own
    advances it.
    """

    actor_rollout_wg = property(lambda self: WholeBatches(self, "actor"))
    ref_policy_wg = property(lambda self: WholeBatches(self, "ref"))
    critic_wg = property(lambda self: WholeBatches(self, "critic"))
    rm_wg = property(lambda self: WholeBatches(self, "reward_model"))
    # a KL in the loss is not in the reward, too
    kl_ctrl = property(
        lambda self: self.ppo.kl_controller if self.ppo.kl_in_reward else kl.FixedKLController(0.0)
    )
    train_dataloader = property(lambda self: OneEpoch(**vars(self.train_loader)))
    val_dataloader = property(lambda self: self.val_loader)
    use_reference_policy = property(lambda self: self.ref is not None)
    use_critic = property(lambda self: self.critic is not None)
    use_rm = property(lambda self: self.reward_model is not None)
    total_training_steps = property(lambda self: self.total_steps)
    # verl's loop sets 0, validates, and adds 1 before its first iteration
    global_steps = property(
        lambda self: self.global_step + 1, lambda self, number: setattr(self, "global_step", number - 1)
    )

    def _create_dataloader(
        self: Any, train_dataset: Any, val_dataset: Any, collate_fn: Any = None, train_sampler: Any = None
    ) -> None:
        """Set ``train_loader`` and ``val_loader``; data sets that are None are read as configured."""
        self.train_loader, self.val_loader = build_loaders(
            self.config,
            self.tokenizer,
            train_dataset,
            val_dataset,
            collate_fn,
            train_sampler,
            self.rows,
            None if self.environments is None else self.environments.tools_of,
        )

    def _validate(self: Any) -> dict[str, float]:
        """Answer and score the validation prompts with the current policy; return the scores by source."""
        if self.val_loader is None:
            return {}
        if self.pipeline is not None:
            self.pipeline.wait()
        return self.validator.report(self.validator.samples(self.timer)).metrics()

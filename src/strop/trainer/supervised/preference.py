"""``strop dpo``: preference optimization without a reward model (DPO and its relatives).

Shapes: B pairs of a batch, N of a data set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from strop.algorithms.preference import REFERENCE_INPUTS, needs_reference
from strop.algorithms.registry import call
from strop.config.schema.supervised import PreferenceConfig
from strop.controller.pools import Role
from strop.data.loader import PromptLoader
from strop.data.rl_dataset import Subset
from strop.errors import CheckpointError
from strop.protocol import DataProto
from strop.trainer.supervised.reference import FOLDER, Reference, complete, load, rows_hash
from strop.trainer.supervised.reward_model import PairTrainer, means_by_source
from strop.workers.losses import pair_figures, preference_loss

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 60.0


class PreferenceTrainer(PairTrainer[PreferenceConfig]):
    """``strop dpo``: raises the probability of chosen answers over that of rejected ones."""

    worker: ClassVar[str] = "strop.workers.supervised:PreferenceWorker"
    role: ClassVar[Role] = Role.Actor
    group_name: ClassVar[str] = "actor"

    def __init__(self, config: PreferenceConfig, tokenizer: Any, **where: Any) -> None:
        """See ``SupervisedTrainer``; ``ConfigError`` for a loss that cannot be used."""
        self._loss = preference_loss(config.update)
        super().__init__(config, tokenizer, **where)
        self._references: dict[str, Reference] = {}
        self._continued: list[str] = []
        """Those that are not of an earlier run in the run folder."""
        self._reference_model: str | None = None
        self._is_prepared = False
        """The rows have the log-probs: fit may be called again, when the model is another."""

    def denominators(self, batch: DataProto) -> dict[str, float]:
        """Count pairs, and the tokens of chosen answers."""
        n_tokens = float(batch.batch["response_mask"].sum())
        return {**super().denominators(batch), "n_tokens": n_tokens}

    def prepare(self, folder: Path) -> None:
        """Compute the reference's log-probs with the model as it was loaded, or read those in ``folder``."""
        if not needs_reference(self._loss) or self._is_prepared:
            return
        # the same weights compute other log-probs with other entries of config.json
        settings = json.dumps(self.config.model.override_config, sort_keys=True, default=str)
        weights = self.group.reference_hash()
        self._reference_model = hashlib.sha256(f"{weights} {settings}".encode()).hexdigest()
        for name, loader in {"train": self.train_loader, "val": self.val_loader}.items():
            if loader is not None:
                self._find_reference(name, loader, folder / f"{FOLDER}/{name}.safetensors")
        self._is_prepared = True

    def _find_reference(self, name: str, loader: PromptLoader, file: Path) -> None:
        """Compute or read the reference's log-probs of a data set, and give them to its rows."""
        dataset: Any = loader.dataset
        identity = {"model": self._reference_model or "", "rows": rows_hash(dataset)}
        found = None
        if self.config.trainer.resume_mode == "auto":  # otherwise these are of a run that is not continued
            found = load(file, **identity)
            if found is not None or not file.exists():
                self._continued.append(name)
        unknown = {name: torch.full((len(dataset),), torch.nan) for name in REFERENCE_INPUTS}
        reference = self._references[name] = found or Reference(columns=unknown, **identity)
        needed = range(len(dataset)) if loader is self.val_loader else self.rows_of_the_run()
        started = time.perf_counter()
        computed = complete(reference, needed, lambda rows: self._infer(Subset(dataset, rows)))
        logger.info(
            "reference log-probs (%s): %d pairs computed in %.0f s, the others as before in this run folder"
            if found is not None
            else "reference log-probs (%s): %d pairs computed in %.0f s",
            name,
            computed,
            time.perf_counter() - started,
        )
        dataset.columns |= reference.columns

    def _infer(self, dataset: Any) -> Iterator[dict[str, Tensor]]:
        """Yield ``REFERENCE_INPUTS`` of all rows by the reference, batch by batch."""
        done, reported = 0, time.perf_counter()
        for batch in self._one_pass(dataset):
            answers = self.call("evaluate_reference", batch)
            yield {name: answers.batch[name.removeprefix("ref_")] for name in REFERENCE_INPUTS}
            done += len(batch)
            if time.perf_counter() - reported > _REPORT_EVERY_S:
                reported = time.perf_counter()
                logger.info("reference log-probs: %d of %d pairs", done, len(dataset))

    def keep(self, folder: Path) -> None:
        for name, reference in self._references.items():
            reference.save(folder / FOLDER / f"{name}.safetensors")

    def keep_stopped(self, folder: Path) -> None:
        """Write the log-probs that are computed so far, but not over those of an earlier run."""
        for name in self._continued:
            if self._references[name].columns[REFERENCE_INPUTS[0]].isfinite().any():
                file = folder / f"{FOLDER}/{name}.safetensors"
                with contextlib.suppress(OSError):
                    self._references[name].save(file)
                    logger.info("reference log-probs (%s): those computed so far are in %s", name, file)

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the reference model."""
        return {"reference_model": self._reference_model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ``CheckpointError`` if the checkpoint was trained with another reference model."""
        before = state.get("reference_model")
        if before is not None and self._reference_model not in (None, before):
            raise CheckpointError(
                f"model.path={self.config.model.path} (hash {str(self._reference_model)[:12]}) is another "
                f"model than the reference of the checkpoint (hash {before[:12]}): a resume needs the model "
                "that the run began with"
            )

    def evaluate(self, batches: PromptLoader) -> dict[str, float]:
        """Return the loss and metrics of all pairs."""
        parts: dict[str, list[Tensor]] = {}
        sources = []
        for batch in batches:
            columns = {
                **self.call("evaluate", batch).batch,
                **{name: batch.batch[name] for name in REFERENCE_INPUTS if name in batch.batch},
                "chosen_length": batch.batch["response_mask"].sum(dim=1),
                "rejected_length": batch.batch["rejected_mask"].sum(dim=1),
            }
            for name, column in columns.items():
                parts.setdefault(name, []).append(column.double())
            sources.append(batch.non_tensor_batch["data_source"])
        columns_N = {name: torch.cat(column) for name, column in parts.items()}
        found = call(self._loss, columns_N)
        nll = -float(columns_N["chosen_log_prob"].sum() / columns_N["chosen_length"].sum())
        self._scores = found.chosen_reward_B, found.rejected_reward_B
        figures = pair_figures(found, columns_N)
        return {
            "loss": found.loss_B.mean().item() + self.config.update.nll_coef * nll,
            **{name: figure_N.mean().item() for name, figure_N in figures.items()},
            **means_by_source("rewards/accuracy", figures["rewards/accuracy"], np.concatenate(sources)),
            "nll": nll,
        }

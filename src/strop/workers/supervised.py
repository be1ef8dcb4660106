"""What the workers of the supervised trainers share: one model, one optimizer step for each batch."""

from __future__ import annotations

from typing import Any

from strop.config.checks.supervised import Supervised, sequences_of_a_row
from strop.data.hub import local_tokenizer
from strop.engines.base import Engine
from strop.engines.micro_batches import MicroBatching
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource
from strop.models.loader import load_tokenizer
from strop.workers.base import Worker


class SupervisedWorker(Worker[Supervised]):
    """One process of the model that is trained."""

    def load_own_tokenizer(self) -> Any:
        """The tokenizer of the run, which is saved beside the model."""
        model, data = self.config.model, self.config.data
        return load_tokenizer(
            local_tokenizer(data.tokenizer or model.path, data.cache_dir),
            trust_remote_code=model.trust_remote_code,
        )

    def build_trained_engine(self, module: RoleModel, weights: WeightSource | None) -> Engine:
        """The engine that trains ``module`` as the section ``update`` says."""
        model, update = self.config.model, self.config.update
        return self.build_engine_on(
            module,
            strategy=update.strategy,
            compute_dtype=model.compute_dtype,
            fsdp=model.fsdp_config,
            weights=weights,
            checkpointing=model.enable_gradient_checkpointing,
            trained=update,
        )

    @property
    def micro_batching(self) -> MicroBatching:
        """How passes are cut on this rank; a row of several sequences has the tokens of all."""
        update = self.config.update
        if not update.use_dynamic_bsz:
            return MicroBatching(rows=update.micro_batch_size_per_gpu)
        return MicroBatching(max_tokens=update.max_token_len_per_gpu // sequences_of_a_row(self.config))

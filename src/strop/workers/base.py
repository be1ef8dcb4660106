"""What every worker has: its rank, its engine, and one way to take an optimizer step."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic

from torch import Tensor

from strop.config.batch_plan import resolve_micro_batch, sequence_parallel_size
from strop.config.schema import Config
from strop.config.trees import Root
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.data.hub import is_hub_name, local_model, local_tokenizer
from strop.engines.base import (
    Engine,
    Loss,
    OffloadSettings,
    OptimizerSettings,
    ShardingSettings,
    build_engine,
    learning_rate_factor,
    pick_device,
    weights_hash,
)
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch import ranks
from strop.errors import ConfigError, ModelError
from strop.models.base import RoleModel
from strop.models.deferred import WeightSource
from strop.models.loader import import_external_lib, load_tokenizer
from strop.protocol import DataProto

# Weights on their way to a rollout with a copy of its own: in buckets, so that memory stays bounded.

BUCKET_BYTES = 256 << 20


def weight_buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, *, keep: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of weights in CPU memory of up to ``max_bytes``, or of one weight that is larger.

    Without ``keep`` (a rank that only takes part in the gathers) the lists are as many, and empty.
    """
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, weight in weights:
        if used and used + weight.nbytes > max_bytes:
            yield bucket
            bucket, used = [], 0
        used += weight.nbytes
        if keep:
            bucket.append((name, weight.to("cpu", copy=True)))  # a later update must not change it
    if used:
        yield bucket


logger = logging.getLogger(__name__)


def sharding_settings(fsdp: Any) -> ShardingSettings:
    """From a section ``fsdp_config``; those of frozen models have fewer keys."""
    keys = fsdp.model_dump()
    wrap = keys.get("wrap_policy", {"min_num_params": keys.get("min_num_params", 0)})
    classes = wrap.get("transformer_layer_cls_to_wrap") or ()
    return ShardingSettings(
        layer_classes=(classes,) if isinstance(classes, str) else tuple(classes),
        min_num_params=wrap["min_num_params"],
        fsdp_size=keys.get("fsdp_size", -1),
    )


def offload_settings(fsdp: Any) -> OffloadSettings:
    """From a section ``fsdp_config``; a frozen model has no optimizer."""
    return OffloadSettings(
        parameters=fsdp.param_offload, optimizer=fsdp.model_dump().get("optimizer_offload", False)
    )


class Worker(Generic[Root]):
    """One process of a role. Subclasses build their model in ``init_model`` and mark what groups may call."""

    engine: Engine
    tokenizer: Any

    def __init__(self, config: Root, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        self.config = config
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.device = pick_device(config.trainer.device)
        self._buckets: Iterator[list[tuple[str, Tensor]]] | None = None

    def find_model(self, path: str, external_lib: str | list[str] | None) -> Path:
        """The local folder of a model, downloaded once; the packages it needs are imported. Collective."""
        import_external_lib(external_lib)
        folder = local_model(path, self.config.data.cache_dir)
        if is_hub_name(path) and len(versions := set(ranks.gathered(folder.name))) > 1:
            raise ModelError(
                f"model {path}: the machines have different versions of it, {', '.join(sorted(versions))}; "
                f"bring all to the newest with `hf download {path}`"
            )
        return folder

    def model_options(self, model: Any) -> dict[str, Any]:
        """By which arguments a loader finds the model of a section ``model``."""
        return {
            "path": self.find_model(model.path, model.external_lib),
            "override_config": model.override_config,
            "trust_remote_code": model.trust_remote_code,
            "attn_implementation": model.attn_implementation,
        }

    @property
    def sharded(self) -> bool:
        """Whether this role's models are spread over several ranks."""
        return self.world_size > 1

    def build_engine_on(
        self,
        module: RoleModel,
        *,
        strategy: str,
        compute_dtype: str,
        fsdp: Any,
        sequence_parallel_size: int = 1,
        weights: WeightSource | None = None,
        checkpointing: bool = False,
        trained: Any | None = None,
    ) -> Engine:
        """The engine of ``module``; ``trained`` is the section with ``optim``, None for inference only.

        ``fsdp`` is the section ``fsdp_config``; ``weights`` are those of a module without any.
        """
        settings, sharding = None, None
        if self.sharded:
            sharding = replace(sharding_settings(fsdp), sequence_parallel_size=sequence_parallel_size)
        if trained is not None:
            optim = trained.optim
            settings = OptimizerSettings(
                betas=(optim.betas[0], optim.betas[1]),
                weight_decay=optim.weight_decay,
                eps=optim.eps,
                grad_clip=trained.grad_clip,
            )
        return build_engine(
            strategy,
            module,
            device=self.device,
            compute_dtype=compute_dtype,
            optimizer=settings,
            gradient_checkpointing=checkpointing and trained is not None,
            sharding=sharding,
            offload=offload_settings(fsdp),
            weights=weights,
        )

    def train_on(
        self, mini_batch: DataProto, loss: Loss, section: Any, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; the metrics of the loss, ``grad_norm``, ``lr``,
        ``skipped_steps``.

        ``mini_batch.meta_info`` holds ``iteration`` (from 0) and ``total_iterations``: they fix the
        learning rate.
        """
        optim, meta = section.optim, mini_batch.meta_info
        learning_rate = optim.lr * learning_rate_factor(
            meta["iteration"],
            total=meta["total_iterations"],
            warmup_ratio=optim.lr_warmup_steps_ratio,
            style=optim.warmup_style,
            min_ratio=optim.min_lr_ratio,
        )
        metrics = self.engine.forward_backward(mini_batch, loss, micro, **options)
        step = self.engine.optimizer_step(learning_rate)
        if step.skipped:
            logger.warning(
                "%s: optimizer step skipped in iteration %d, its gradient norm is %s",
                self.role.name,
                meta["iteration"] + 1,
                step.grad_norm,
            )
        return {
            **metrics,
            "grad_norm": step.grad_norm,
            "lr": learning_rate,
            "skipped_steps": float(step.skipped),
        }

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, background: bool = False) -> None:
        """Write the training state into ``folder`` and the model as it is into ``folder/huggingface``.

        With ``background`` the state is written while training goes on, until ``finish_save``; the model's
        folder gets no weights then: ``export_from_shards`` makes them from the state.
        """
        self.engine.save(folder, background=background)
        self.engine.export(folder / "huggingface", self.tokenizer, weights=not background)

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def save_is_done(self) -> bool:
        """Whether no background save is under way; does not wait."""
        return self.engine.save_is_done()

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def finish_save(self) -> None:
        """Wait for the background save, if there is one; ``CheckpointError`` when it failed.

        Beside calls, because a run may be ended while a call hangs: its save need not be lost.
        """
        self.engine.finish_save()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Read what ``save_checkpoint`` wrote, on any number of ranks."""
        self.engine.load(folder)

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; an earlier one is replaced when the new one is whole."""
        building = folder.with_name(f"{folder.name}.tmp")
        if self.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
        self.engine.export(building, self.tokenizer)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)

    @register(Dispatch.ONE_TO_ALL)
    def weights_hash(self) -> str:
        """SHA-256 over all parameters, however they are sharded."""
        return weights_hash(self.engine.named_weights())

    @register(Dispatch.ONE_TO_ALL)
    def weight_bucket(self, restart: bool, max_bytes: int = BUCKET_BYTES) -> list[tuple[str, Tensor]] | None:
        """The next weights, up to ``max_bytes`` but at least one, in CPU memory; None after the last.

        ``restart`` begins anew with the weights of now. Every rank takes part, rank zero has the answer.
        """
        if restart or self._buckets is None:
            self._buckets = weight_buckets(self.engine.named_weights(), max_bytes, keep=self.rank == 0)
        bucket = next(self._buckets, None)
        if bucket is None:
            self._buckets = None
        return bucket if self.rank == 0 else None


# What the workers of reinforcement learning share: passes whose micro-batches the configuration names.


class RoleWorker(Worker[Config]):
    """One process of actor, rollout, reference, critic or reward model."""

    shared_passes: ClassVar[Mapping[str, str]] = {}
    """Data-parallel methods whose rows several ranks may share -> their pass, a key of ``MICRO_BATCHES``."""

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        is_critic = role is Role.Critic
        self.strategy = config.critic.strategy if is_critic else config.actor_rollout_ref.actor.strategy

    def load_tokenizer(self, path: str) -> Any:
        """The tokenizer of a local path, a URL or a name on the hub."""
        return load_tokenizer(
            local_tokenizer(path, self.config.data.cache_dir),
            trust_remote_code=self.config.actor_rollout_ref.model.trust_remote_code,
        )

    def data_parallel_place(self, method: str) -> tuple[int, int]:
        """Which part of the rows of a data-parallel ``method`` this rank gets, and how many parts there are.

        Neighbouring ranks that share sequences get the same part.
        """
        size, name = 1, self.shared_passes.get(method)
        if name is not None:
            with suppress(ConfigError):  # a pass of another role: `check` has seen this role's own
                size = sequence_parallel_size(self.config, name, self.world_size)
        return self.rank // size, self.world_size // size

    def build_engine(
        self,
        module: RoleModel,
        *,
        name: str,
        compute_dtype: str,
        fsdp: Any,
        weights: WeightSource | None = None,
        checkpointing: bool = False,
        trained: Any | None = None,
    ) -> Engine:
        """See ``build_engine_on``; ``name`` is one of the module's passes, a key of ``MICRO_BATCHES``."""
        return self.build_engine_on(
            module,
            strategy=self.strategy,
            compute_dtype=compute_dtype,
            fsdp=fsdp,
            sequence_parallel_size=sequence_parallel_size(self.config, name, self.world_size),
            weights=weights,
            checkpointing=checkpointing,
            trained=trained,
        )

    def micro_batching(self, name: str) -> MicroBatching:
        """How the pass ``name`` (a key of ``MICRO_BATCHES``) is cut on this rank."""
        size = resolve_micro_batch(self.config, name, self.world_size)
        return MicroBatching(rows=size.rows, max_tokens=size.max_tokens)

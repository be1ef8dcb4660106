"""``Worker``: one process of a role, with its engine, optimizer steps and checkpoints.

``RoleWorker`` adds what the roles of reinforcement learning share: passes whose micro-batches and sequence
parallelism the configuration names.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

import torch

from strop import pictures, ranks
from strop.config.backends import ENGINES
from strop.config.batch_plan import resolve_micro_batch, sequence_parallel_size
from strop.config.schema import Config
from strop.config.trees import Root
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role, name_of
from strop.data.fetch import local_path
from strop.data.hub import is_hub_name, local_model, local_tokenizer
from strop.data.pictures.expand import load_image_processor, uses_pillow
from strop.engines.base import (
    Engine,
    EngineSpec,
    Loss,
    ModelSpec,
    OptimizerSettings,
    engine_class,
    learning_rate_factor,
    weights_hash,
)
from strop.engines.device import pick_device
from strop.engines.micro_batches import MicroBatching
from strop.errors import CheckpointError, ConfigError, ModelError
from strop.manifest import (
    TRAINER_STATE,
    Manifest,
    covering,
    describe,
    leave_digest,
    remedy_of,
    require_unchanged,
    write,
)
from strop.models.folder import import_external_lib, load_tokenizer
from strop.models.lora import LoraSettings
from strop.models.vision import take_work
from strop.protocol import DataProto
from strop.workers.memory import PEAKS, keep_freed_memory, prefer_expandable_segments

logger = logging.getLogger(__name__)


class Worker(Generic[Root]):
    """One process of a role. Subclasses build their model in ``init_model`` and mark what groups may call."""

    engine: Engine
    tokenizer: Any
    max_pictures: int = 0
    """Most pictures of a row; 0: rows of text."""
    image_processor: str | None = None
    """Class of the driver's image processor; None if it is not known."""
    merges_export: bool = False
    """Export a whole model with the LoRA adapters merged in."""

    def __init__(self, config: Root, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        self.config = config
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.device = pick_device(config.trainer.device)
        prefer_expandable_segments(config, name_of(role), self.device)
        keep_freed_memory(self.device)
        self.phases: set[str] = set()
        self._pictures: dict[int, pictures.Picture] = {}

    @register(Dispatch.ONE_TO_ALL)
    def set_pictures(self, most: int, image_processor: str | None = None) -> None:
        """Let the models read pictures, at most ``most`` a row; call it before ``init_model``.

        ``image_processor``: the class by which the driver has counted their tokens.
        """
        self.max_pictures, self.image_processor = most, image_processor

    @register(Dispatch.ONE_TO_ALL)
    def hold_pictures(self, files: Mapping[int, pictures.Picture]) -> None:
        """Keep pictures that later calls name by their digests."""
        self._pictures |= files

    @register(Dispatch.ONE_TO_ALL)
    def forget_pictures(self, digests: Sequence[int]) -> None:
        """Drop pictures that ``hold_pictures`` brought."""
        for digest in digests:
            self._pictures.pop(digest, None)

    def image_processor_of(self, folder: Path) -> Any | None:
        """Return the image processor of a model's folder; None for rows of text.

        Raises ``ModelError`` if transformers has another back-end here than in the driver's process.
        """
        if not self.max_pictures:
            return None
        data: Any = self.config.data
        found = load_image_processor(folder, min_pixels=data.min_pixels, max_pixels=data.max_pixels)
        name, expected = type(found).__name__, self.image_processor
        if expected is not None and uses_pillow(name) != uses_pillow(expected):
            raise ModelError(
                f"pictures: {name} makes the pixels on {platform.node()} and {expected} in the driver's "
                "process, and they differ; install torchvision in both environments, or in neither"
            )
        return found

    def find_model(self, path: str, external_lib: str | list[str] | None, *, weights: bool = True) -> Path:
        """Return the local folder of a model, downloaded once; import the packages it needs. Collective.

        ``weights=False``: neither download nor compare them.
        """
        import_external_lib(external_lib)
        if not weights:
            return local_tokenizer(path, self.config.data.cache_dir)
        folder = local_model(path, self.config.data.cache_dir)
        if is_hub_name(path) and len(versions := set(ranks.gathered(folder.name))) > 1:
            raise ModelError(
                f"model {path}: the machines have different versions of it, {', '.join(sorted(versions))}; "
                f"bring all to the newest with `hf download {path}`"
            )
        self._require_unchanged(folder, covering(folder), remedy_of(folder))
        return folder

    def load_tokenizer_from(self, path: str, *, trust_remote_code: bool) -> Any:
        """Load the tokenizer of a local path, a URL or a name on the hub."""
        folder = local_tokenizer(path, self.config.data.cache_dir)
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)

    def model_options(self, model: Any, *, weights: bool = True) -> dict[str, Any]:
        """Return the loader's arguments for a section ``model``: ``path`` and options. Collective.

        ``weights`` is that of ``find_model``.
        """
        return {
            "path": self.find_model(model.path, model.external_lib, weights=weights),
            "override_config": model.override_config,
            "trust_remote_code": model.trust_remote_code,
            "attn_implementation": model.attn_implementation,
        }

    def adapters_of(self, model: Any, key: str) -> LoraSettings | None:
        """Return the LoRA adapters of a section ``model``, whose name is ``key``; None if it has none."""
        if not model.has_adapters:
            return None
        base, folder = model.path, model.lora_adapter_path
        return LoraSettings(
            # adapter_config.json names the base model, wherever the folder is loaded from; of a URL its copy
            base=base if is_hub_name(base) else os.path.abspath(local_path(base, self.config.data.cache_dir)),
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
            modules_to_save=tuple(model.modules_to_save),
            folder=None if folder is None else local_path(folder, self.config.data.cache_dir),
            seed=self.config.trainer.seed,
            key=key,
        )

    def engine_of(
        self,
        kind: Any,
        model: Mapping[str, Any],
        *,
        strategy: str,
        section: Any,
        trained: Any | None,
        checkpointing: Literal["selective"] | bool = False,
        sequence_parallel_size: int = 1,
        role: str | None = None,
        **spec: Any,
    ) -> Engine:
        """Build the engine of a ``kind`` of model (``ModelSpec.kind``).

        ``model`` are loader arguments, ``section`` is the strategy's section, ``trained`` the section with
        ``optim`` (None: inference only), ``role`` a name for errors if the worker has several models,
        ``spec`` are further fields of ``ModelSpec``.
        """
        settings = None
        if trained is not None:
            optim = trained.optim
            settings = OptimizerSettings(
                betas=(optim.betas[0], optim.betas[1]),
                weight_decay=optim.weight_decay,
                eps=optim.eps,
                grad_clip=trained.grad_clip,
            )
        options = dict(model)
        path = options.pop("path")
        return engine_class(strategy).build(
            ModelSpec(
                role=role or name_of(self.role),
                kind=kind,
                path=path,
                image_processor=self.image_processor_of(path),
                options=options,
                gradient_checkpointing=checkpointing if trained is not None else False,
                **spec,
            ),
            EngineSpec(
                device=self.device,
                world_size=self.world_size,
                section=section,
                sequence_parallel_size=sequence_parallel_size,
                optimizer=settings,
            ),
        )

    def train_on(
        self, mini_batch: DataProto, loss: Loss, section: Any, micro: MicroBatching, **options: Any
    ) -> dict[str, float]:
        """Take one optimizer step; return the metrics of the loss, ``grad_norm``, ``lr``, ``skipped_steps``.

        ``mini_batch.meta_info`` has ``iteration`` (from 0), ``total_iterations`` and ``first_update``, the
        iteration of the model's first update, which determine the learning rate.
        """
        optim, meta = section.optim, mini_batch.meta_info
        learning_rate = optim.lr * learning_rate_factor(
            meta["iteration"],
            total=meta["total_iterations"],
            ratio=optim.lr_warmup_steps_ratio,
            steps=optim.lr_warmup_steps,
            first=meta["first_update"],
            style=optim.warmup_style,
            min_ratio=optim.min_lr_ratio,
        )
        metrics = self.engine.forward_backward(mini_batch, loss, micro, **options)
        step = self.engine.optimizer_step(learning_rate)
        if step.skipped:
            logger.warning(
                "%s: optimizer step skipped in iteration %d, its gradient norm is %s",
                name_of(self.role),
                meta["iteration"] + 1,
                step.grad_norm,
            )
        return {
            **metrics,
            "grad_norm": step.grad_norm,
            "lr": learning_rate,
            "skipped_steps": float(step.skipped),
        }

    @property
    def export_dtype(self) -> torch.dtype | None:
        """Dtype of exported weights; None: the source's."""
        name = self.config.trainer.export_dtype
        return None if name is None else getattr(torch, name)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, background: bool = False) -> None:
        """Write weights, buffers and moments into ``folder`` and the model into ``folder/huggingface``.

        With ``background`` the state is written while training goes on, until ``finish_save``, and
        ``huggingface`` has no weights: ``export_from_shards`` makes them from the state. LoRA adapters are
        in ``huggingface`` in any case, and the base model in neither.
        """
        self.engine.save(folder, background=background)
        exported = folder / "huggingface"
        self.engine.export(exported, self.tokenizer, weights=not background, dtype=self.export_dtype)
        if self.rank == 0:  # here, as the files are in this machine's memory
            for path in exported.glob("*.safetensors"):
                leave_digest(path)

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def save_is_done(self) -> bool:
        """Return True if no background save is running. Does not block."""
        return self.engine.save_is_done()

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def finish_save(self) -> None:
        """Wait for the background save, if any; ``CheckpointError`` if it failed.

        Concurrent with other calls: when a run is ended because a call hangs, its save is still completed.
        """
        self.engine.finish_save()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Read what ``save_checkpoint`` wrote, on any number of ranks.

        Raises ``CheckpointError`` if a file has changed since.
        """
        files = covering(folder)
        self._require_unchanged(
            folder, {name: entry for name, entry in files.items() if not name.startswith("huggingface/")}
        )
        self.engine.load(folder)

    def _require_unchanged(self, folder: Path, files: Manifest, remedy: str = "") -> None:
        """Read a share of ``files`` on each rank, and raise the first rank's error on all. Collective.

        Rank r reads what rank r wrote if there are as many ranks as then.
        """
        # by length first, so that __9_0.distcp comes before __10_0.distcp; .metadata, of no rank, is last
        names = sorted(files, key=lambda name: (name.startswith("."), len(name), name))
        mine = {name: files[name] for name in names[self.rank :: self.world_size]}
        problem = ""
        try:
            require_unchanged(str(folder), folder, mine, remedy)
        except CheckpointError as error:
            problem = str(error)
        # raised by all: the others would wait in the next collective
        if problems := [found for found in ranks.gathered(problem) if found]:
            raise CheckpointError(problems[0])

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder: Path, iteration: int, saved: Path | None = None) -> None:
        """Write the model as a Hugging Face folder, replacing an earlier one once the new one is complete.

        ``iteration`` is that of its weights, written to ``trainer_state.json``. ``saved`` is the whole folder
        of the same model in a checkpoint: weights in it get a second name and are not written again.
        """
        building = folder.with_name(f"{folder.name}.tmp")
        saved = None if self.merges_export else saved
        if self.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
            if saved is not None:
                shutil.copytree(saved, building, copy_function=_link_weights)
        if saved is None:
            self.engine.export(building, self.tokenizer, merged=self.merges_export, dtype=self.export_dtype)
        if self.rank == 0:
            (building / TRAINER_STATE).write_text(json.dumps({"global_step": iteration}) + "\n")
            write(building, describe(building, None if saved is None else covering(saved)))
            shutil.rmtree(folder, ignore_errors=True)
            # renamed last: after a kill the new model is whole in NAME.tmp, or in its place
            building.rename(folder)

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def memory_peaks(self) -> dict[str, float]:
        """Return the largest memory of the process in GiB in each phase since the last call; of rank zero."""
        return PEAKS.take(self.phases)

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def picture_work(self) -> dict[str, float]:
        """Return metrics of the pictures that the process has processed since the last call; of rank zero."""
        return take_work()

    @register(Dispatch.ONE_TO_ALL)
    def weights_hash(self) -> str:
        """Return SHA-256 over all parameters, independent of their sharding."""
        return weights_hash(self.engine.named_weights())


class RoleWorker(Worker[Config]):
    """One process of actor, rollout, reference, critic or reward model."""

    shared_passes: ClassVar[Mapping[str, str]] = {}
    """Data-parallel method whose rows several ranks may share -> its pass, a key of ``MICRO_BATCHES``."""

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        is_critic = role is Role.Critic
        self.strategy = config.critic.strategy if is_critic else config.actor_rollout_ref.actor.strategy

    @register(Dispatch.ONE_TO_ALL)
    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Set environment variables that keys name; call it before ``init_model``.

        A process of a cluster that was joined has those of its node, not the run's.
        """
        os.environ.update(variables)

    def strategy_section(self) -> Any:
        """Return the strategy's section of this role's model."""
        passes = {Role.Critic: "critic", Role.RewardModel: "reward_model", Role.RefPolicy: "ref"}
        return ENGINES[self.strategy].section_of(self.config, passes.get(self.role, "actor"))

    def load_tokenizer(self, path: str) -> Any:
        """Load the tokenizer of a local path, a URL or a name on the hub.

        The policy's ``external_lib`` is imported first: it may register the tokenizer's class.
        """
        policy = self.config.actor_rollout_ref.model
        import_external_lib(policy.external_lib)
        return self.load_tokenizer_from(path, trust_remote_code=policy.trust_remote_code)

    def data_parallel_place(self, method: str) -> tuple[int, int]:
        """Return this rank's part of the rows of a data-parallel ``method``, and the number of parts."""
        name = self.shared_passes.get(method)
        if name is None:
            return self.rank, self.world_size
        size = 1
        with suppress(ConfigError):  # a pass of another role; the preflight check covers this role's passes
            size = sequence_parallel_size(self.config, name, self.world_size)
        return engine_class(self.strategy).data_parallel_place(
            self.rank, self.world_size, section=self.strategy_section(), sequence_parallel_size=size
        )

    def build_engine(self, kind: Any, model: Mapping[str, Any], *, name: str, **options: Any) -> Engine:
        """Build the engine whose passes share sequences like the pass ``name``; see ``engine_of``."""
        return self.engine_of(
            kind,
            model,
            strategy=self.strategy,
            sequence_parallel_size=sequence_parallel_size(self.config, name, self.world_size),
            **{"section": self.strategy_section(), **options},
        )

    def micro_batching(self, name: str) -> MicroBatching:
        """Return the micro-batch size of the pass ``name`` (a key of ``MICRO_BATCHES``) on this rank."""
        size = resolve_micro_batch(self.config, name, self.world_size)
        return MicroBatching(rows=size.rows, max_tokens=size.max_tokens)


def options_of(model: Any, key: str, *, trained: Any | None) -> dict[str, Any]:
    """Return the options of ``engine_of`` that a section ``model``, whose name is ``key``, decides.

    ``trained`` is that of ``engine_of``. Adapters, which a reference has not, are no part of them.
    """
    return {
        "compute_dtype": model.compute_dtype,
        "packed": model.use_remove_padding,
        "packing_key": f"{key}.use_remove_padding",
        "compile": model.compile,
        "checkpointing": model.enable_gradient_checkpointing,
        "trained": trained,
        "freeze": None if trained is None else model.freeze,
    }


def _link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        with suppress(OSError):  # a file system without hard links
            os.link(source, target)
            return
    shutil.copy2(source, target)  # not a second name for what people edit

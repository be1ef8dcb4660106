"""``ActorRolloutRefWorker``: actor, rollout and reference model of a policy, as its role requires.

Shapes: B samples, T response tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.agents.program import Program, ProgramPool
from strop.config.backends import ENGINES, ROLLOUTS
from strop.config.roles import (
    has_reward,
    loads_policy,
    reference_is_the_actor,
    teacher_hidden,
    teacher_is_the_actor,
    teacher_models,
    teaches_by_advantages,
    uses_full_kl,
    uses_reference,
    uses_teacher,
)
from strop.config.schema import Config
from strop.controller.group import Dispatch, register
from strop.controller.pools import Role
from strop.controller.rendezvous import open_store
from strop.data.hub import local_tokenizer
from strop.data.template_check import chat_template_of
from strop.engines.base import Engine, Loss
from strop.environments.loading import Environments
from strop.environments.pool import EnvironmentPool
from strop.errors import CheckpointError, ModelError, TrainingError, raised_as
from strop.files import atomic_path
from strop.manifest import covering
from strop.models.loader import dtype_named
from strop.models.teaching import Teaching
from strop.protocol import DataProto
from strop.rollout.base import Advanced, Finished, RolloutEngine, RolloutSpec, SamplingParams, build_rollout
from strop.rollout.transfer.broadcast import Channel
from strop.rollout.transfer.object_store import BUCKET_BYTES, weight_buckets
from strop.rollout.weights import checksums, require_equal_checksums
from strop.workers.base import RoleWorker, options_of
from strop.workers.losses import Recorder, actor_objective
from strop.workers.memory import phase
from strop.workers.teacher import common_words, cut_passes, teacher_columns


class ActorRolloutRefWorker(RoleWorker):
    """Hold the trained policy and a rollout, or a frozen reference, or both."""

    shared_passes: ClassVar = {
        "compute_log_prob": "log_prob",
        "compute_ref_log_prob": "ref",
        "compute_teacher": "teacher",
        "update_actor": "actor",
        "update_actor_on_policy": "actor",
    }
    rollout: RolloutEngine
    rollout_version: int | None = None
    """Version of the rollout's weights, numbered by the trainer."""
    reference: Engine
    environments: Environments | None = None
    program: Program | None = None
    _pool: EnvironmentPool | ProgramPool | None = None
    _channel: Channel

    def __init__(self, config: Config, role: Role, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, role, rank=rank, world_size=world_size)
        self.section = config.actor_rollout_ref
        self.temperature = self.section.rollout.temperature
        actor = self.section.actor
        self.full_kl_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
        self.full_kl = uses_full_kl(config)
        self.teaches_in_loss = uses_teacher(config) and not teaches_by_advantages(config)
        self._is_reference = role is not Role.RefPolicy and reference_is_the_actor(config)
        self._stopping = threading.Event()
        self._loading_s = 0.0  # of weights, since the last generation
        self._buckets: Iterator[list[tuple[str, Tensor]]] | None = None
        self._admitted: dict[int, list[str]] = {}
        """Number of each batch in flight -> the uids of its prompts."""

    @register(Dispatch.ONE_TO_ALL)
    def set_environments(self, environments: Environments) -> None:
        """Set what answers the turns of samples; call it before ``init_model``."""
        self.environments = environments

    @register(Dispatch.ONE_TO_ALL)
    def set_program(self, program: Program) -> None:
        """Set the agent program whose sessions samples are; call it before ``init_model``."""
        self.program = program

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model (twice if the role has actor and reference) and build what the role needs."""
        self.tokenizer = self.load_tokenizer(self.config.data.tokenizer or self.section.model.path)
        self.words = common_words(self.config, self.tokenizer) if uses_teacher(self.config) else 0
        self.merges_export = self.section.model.lora_merge
        shares = self.role is Role.ActorRolloutRef and uses_reference(self.config)
        shares = shares and not self._is_reference
        if shares or self.role is Role.RefPolicy:
            self.reference = self._build_engine("ref")
        if self.role is Role.Rollout:
            self.rollout = self._build_rollout()
        elif self.role is not Role.RefPolicy:
            self.engine = self._build_engine("actor")
            if self.role is not Role.Actor:
                with self.engine.on_device() if self._shareable_model else contextlib.nullcontext():
                    self.rollout = self._build_rollout()
                self.rollout.release()

    def _build_engine(self, name: str) -> Engine:
        """Build the engine of the section ``name``: ``actor`` or ``ref``."""
        policy, model = self.section, self.section.model
        trains = name == "actor" and not self.config.trainer.val_only
        return self.build_engine(
            "policy",
            self.model_options(model),
            name="actor" if trains else "ref",
            role="actor" if name == "actor" else "reference",
            section=ENGINES[self.strategy].section_of(self.config, name),
            **options_of(model, "actor_rollout_ref.model", trained=policy.actor if trains else None),
            # the reference is the base model
            lora=self.adapters_of(model, "actor_rollout_ref.model") if name == "actor" else None,
            # the actor computes the full KL, from the reference's hidden states
            keeps_reference_head=name == "actor" and (self.full_kl or self._keeps_teacher_head),
            teaching=self._teaching() if trains and self.teaches_in_loss else None,
        )

    @property
    def _keeps_teacher_head(self) -> bool:
        """True if the teacher is the actor with its adapters off, and its hidden states are compared."""
        return teacher_hidden(self.config) and teacher_is_the_actor(self.config)

    def _teaching(self) -> Teaching:
        teacher = self.config.teacher
        models = teacher_models(self.config).values() if teacher_hidden(self.config) else ()
        return Teaching(
            kind=teacher.kl,
            js_weight=teacher.js_weight,
            words=self.words,
            models=[self.model_options(model) for model in models],
        )

    @property
    def _shareable_model(self) -> PreTrainedModel | None:
        """The actor's module, if the rollout can generate with it."""
        shares = self.role is not Role.Rollout and ROLLOUTS[self.section.rollout.name].shared is not None
        return self.engine.shareable_model if shares else None

    def close(self) -> None:
        """End the processes of environments, or of agent programs and their endpoint."""
        if (close := getattr(getattr(self, "rollout", None), "close", None)) is not None:
            close()
        if self._pool is not None:
            self._pool.close()

    def _build_rollout(self) -> RolloutEngine:
        config, apart = self.config, self.role is Role.Rollout
        environments = programs = None
        tokenizer = copy(self.tokenizer)  # an exported model keeps the template of its own
        if (template := chat_template_of(config.data)) is not None:
            tokenizer.chat_template = template
        if self.environments is not None:
            environments = self._pool = EnvironmentPool(self.environments, config.environment)
        if self.program is not None:
            programs = self._pool = ProgramPool(self.program, config.agent)
        model = self.model_options(self.section.model, weights=loads_policy(config))
        spec = RolloutSpec(
            config=config,
            model=model,
            image_processor=self.image_processor_of(model["path"]),
            max_pictures=self.max_pictures,
            tokenizer=tokenizer,
            tokenizer_path=local_tokenizer(
                config.data.tokenizer or self.section.model.path, config.data.cache_dir
            ),
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            shared_model=self._shareable_model,
            compute_dtype=None if apart else self.engine.compute_dtype,
            weights=None if apart else self.engine.named_weights(dtype=self._rollout_dtype),
            environments=self.environments,
            environment_pool=environments,
            program_pool=programs,
        )
        return build_rollout(self.section.rollout.name, spec)

    @property
    def _rollout_dtype(self) -> torch.dtype:
        """Dtype of the rollout's copy of the weights, in which they are sent."""
        return dtype_named(ROLLOUTS[self.section.rollout.name].dtype(self.config), self.device)

    @register(Dispatch.DATA_PARALLEL)
    @phase("gen")
    def generate_sequences(
        self,
        prompts: DataProto,
        finished: Finished | None = None,
        advanced: Callable[[int, int, int], None] | None = None,
    ) -> DataProto:
        """Generate responses to each prompt.

        ``meta_info["mode"]`` is ``train``, the default, ``greedy`` or ``validate``. Prompts without ``seeds``
        get some of torch's generator.
        ``meta_info["max_tokens"]`` limits responses in place of the configuration.
        With a number in ``meta_info["batch"]`` the result has ``rollout_versions``, and in
        ``meta_info["generation"]`` when it was generated; if ``admit_prompts`` got the same prompts with that
        number, ``TrainingError`` otherwise, their samples are completed.
        ``finished`` is called for samples that are complete before the call returns; ``advanced``, twice a
        second, with 0 (a row of this rank), its samples that are complete, and tokens sampled.
        """
        self.rollout.advanced, self.rollout.stopping = _counting(advanced), self._stopping
        version = prompts.meta_info.get("weights_version", self.rollout_version)
        # without this, samples of a stale policy would train without any error
        if version != self.rollout_version:
            raise ModelError(
                f"the rollout has the weights of version {self.rollout_version}, and version {version} was "
                "requested: the actor was updated without sync_rollout or load_weights"
            )
        begun, batch = time.time(), prompts.meta_info.get("batch")
        if batch in self._admitted and _mode(prompts) == "train":
            result = self._finish(batch, prompts, finished)
        else:
            params = self._sampling(prompts)
            if "seeds" not in prompts:  # a loader's batch; the trainer's own have seeds of their iteration
                seeds_PN = torch.randint(2**63 - 1, (len(prompts), params.n))
                prompts = prompts.union(DataProto({"seeds": seeds_PN}))
            with self.engine.on_device() if self._shareable_model else contextlib.nullcontext():
                result = self.rollout.generate(prompts, params, finished)
        if batch is None:
            return result
        if "rollout_versions" not in result:
            mask_BT = result.batch["response_mask"]
            versions_BT = torch.where(mask_BT > 0, self._known_version, -1).int()
            result = result.union(DataProto({"rollout_versions": versions_BT}))
        times = {"begun": begun, "ended": time.time(), "loading": self._loading_s, "version": version}
        self._loading_s = 0.0
        result.meta_info["generation"] = times
        return result

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def stop_generation(self) -> None:
        """Let ``generate_sequences`` raise ``GenerationStopped`` from now on, also where it is under way.

        A run that ends calls it, so that its last save does not wait for samples that nothing uses.
        """
        self._stopping.set()

    @register(Dispatch.ONE_TO_ALL)
    def allow_generation(self) -> None:
        """End what ``stop_generation`` began, behind the calls that were started before."""
        self._stopping.clear()

    @register(Dispatch.DATA_PARALLEL)
    def admit_prompts(self, prompts: DataProto) -> None:
        """Queue prompts ahead, as batch number ``meta_info["batch"]``; numbers ascend.

        Their samples are generated with those of older batches. A ``generate_sequences`` of equal columns,
        with the number in ``meta_info`` and the mode ``train``, completes them.
        """
        batch = prompts.meta_info["batch"]
        self.rollout.admit(batch, prompts, self._sampling(prompts))
        self._admitted[batch] = _uids(prompts)

    @register(Dispatch.ONE_TO_ALL)
    def save_in_flight(self, folder: Path) -> None:
        """Write what is generated of the admitted batches to ``rank_<rank>.pt`` in ``folder``, atomically.

        Raises ``CheckpointError`` if it cannot be written.
        """
        state = {"uids": self._admitted, "rollout": self.rollout.in_flight()}
        path = folder / f"rank_{self.rank}.pt"
        # torch raises RuntimeError for a full disk
        with (
            raised_as(CheckpointError, f"cannot write {path}", OSError, RuntimeError),
            atomic_path(path) as temporary,
        ):
            torch.save(state, temporary)

    @register(Dispatch.ONE_TO_ALL)
    def load_in_flight(self, folder: Path) -> None:
        """Continue from what ``save_in_flight`` wrote; the same batches have been admitted again before.

        Raises ``CheckpointError`` if the number of ranks or the admitted prompts differ, or a file is
        damaged. Collective.
        """
        names = {name: entry for name, entry in covering(folder).items() if name.startswith("rank_")}
        self._require_unchanged(folder, names)
        ranks = len(list(folder.glob("rank_*.pt")))
        if ranks != self.world_size:
            raise CheckpointError(
                f"{folder} has the samples in flight of {ranks} rollout processes, and this run has "
                f"{self.world_size}; resume with {ranks}"
            )
        path = folder / f"rank_{self.rank}.pt"
        with raised_as(CheckpointError, f"{path} is damaged"):
            state = torch.load(path, weights_only=True)
        for batch, uids in self._admitted.items():
            if batch in state["uids"] and (difference := _first_difference(uids, state["uids"][batch])):
                raise CheckpointError(f"{path}: batch {batch} was admitted with other prompts: {difference}")
        self.rollout.restore(state["rollout"])

    def _finish(self, batch: int, prompts: DataProto, finished: Finished | None) -> DataProto:
        if difference := _first_difference(_uids(prompts), self._admitted.pop(batch)):
            raise TrainingError(f"batch {batch} was admitted with other prompts: {difference}")
        result = self.rollout.finish(batch, self._known_version, finished)
        metrics = result.meta_info.get("rollout_metrics", {})
        # the result has the entries of admit_prompts, from before the last update
        result.meta_info = {**prompts.meta_info, "rollout_metrics": metrics}
        return result

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        mode = _mode(prompts)
        params = SamplingParams.from_config(self.section.rollout, validate=mode == "validate")
        params = dataclasses.replace(
            params, max_tokens=prompts.meta_info.get("max_tokens", params.max_tokens)
        )
        return dataclasses.replace(params, n=1, do_sample=False) if mode == "greedy" else params

    @property
    def _known_version(self) -> int:
        """The version of the rollout's weights; ``ModelError`` before the first or during a transfer."""
        if self.rollout_version is None:
            raise ModelError("numbered batches need weights of a version: call load_weights first")
        return self.rollout_version

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        """Copy the actor's current weights (policy ``version``) into the co-located rollout."""
        if self.role is not Role.Rollout:  # else there is no actor, and the rollout keeps its weights
            self.rollout.update_weights(self.engine.named_weights(dtype=self._rollout_dtype))
        self.rollout_version = version

    @register(Dispatch.ONE_TO_ALL)
    def weight_bucket(self, restart: bool, max_bytes: int = BUCKET_BYTES) -> list[tuple[str, Tensor]] | None:
        """Return the next weights in CPU memory, up to ``max_bytes`` but at least one; None after the last.

        ``restart`` begins with the first of the current weights. Collective; only rank zero gets a result.
        """
        if restart or self._buckets is None:
            weights = self.engine.named_weights(dtype=self._rollout_dtype)
            self._buckets = weight_buckets(weights, max_bytes, keep=self.rank == 0)
        # on every rank: each weight is gathered by all
        bucket = next(self._buckets, None)
        if bucket is None:
            self._buckets = None
        return bucket if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: list[tuple[str, Tensor]] | None, version: int = 0) -> None:
        """Load the actor's weights, one ``weight_bucket`` per call, None after the last.

        Raises ``ModelError`` for a parameter that is unknown, misshapen, duplicated or missing.
        """
        begun = time.time()
        self.rollout.update_weights(bucket or [], last=bucket is None)
        self.rollout_version = version if bucket is None else None
        self._loading_s += time.time() - begun

    @register(Dispatch.RANK_ZERO)
    def open_channel(self, address: str) -> int | None:
        """Open the store of a broadcast channel to the rollout at ``address`` of this node; return its port.

        None if weights travel in buckets.
        """
        way, on_a_cpu = self.section.rollout.weight_transfer, self.device.type == "cpu"
        takes_broadcasts = ROLLOUTS[self.section.rollout.name].takes_broadcasts
        if not takes_broadcasts or way == "object_store" or (way == "auto" and on_a_cpu):
            return None
        self._store, port = open_store(address)
        return port

    @register(Dispatch.ONE_TO_ALL)
    def join_channel(self, address: str, port: int, size: int) -> None:
        """Form the group of the actor's rank zero, which opened the store, and all ranks of the rollout."""
        if self.role is Role.Rollout:
            self._channel = Channel.to_sender(address, port, 1 + self.rank, size, self.device)
        elif self.rank == 0:
            self._channel = Channel(self._store, 0, size, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self) -> None:
        """Broadcast the actor's current weights; return when all ranks of the rollout have them."""
        weights = self.engine.named_weights(dtype=self._rollout_dtype)
        if self.rank == 0:
            self._channel.send(weights)
        else:
            deque(weights, maxlen=0)  # it takes part in the gathers

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, version: int) -> None:
        """Load what ``send_weights`` sends; errors are those of ``load_weights``."""
        begun, arriving = time.time(), self._channel.receive()
        self.rollout_version = None  # after an error the weights are of two versions
        try:
            self.rollout.update_weights(arriving)
        finally:
            deque(arriving, maxlen=0)  # after an error, the other ranks wait for this one
        self.rollout_version = version
        self._loading_s += time.time() - begun

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Free the rollout's weights and KV cache for the update, where it can sleep."""
        self.rollout.release()

    @register(Dispatch.ONE_TO_ALL)
    def weight_checksums(self) -> dict[str, int]:
        """Return checksums of the actor's weights in the rollout's dtype, by name in a checkpoint."""
        dtype = self._rollout_dtype
        return checksums(self.engine.named_weights(as_saved=True, dtype=dtype), dtype)

    @register(Dispatch.ONE_TO_ALL)
    def verify_rollout(self, version: int, expected: dict[str, int] | None = None) -> None:
        """Raise ``ModelError`` naming weights of the rollout that differ from the actor's.

        ``expected`` are the actor's checksums; None: the actor is in this process.
        """
        held = self.rollout.checksums()
        if held is None:
            return
        require_equal_checksums(expected or self.weight_checksums(), held, version)

    @register(Dispatch.DATA_PARALLEL)
    @phase("old_log_prob")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` [B, T], and ``full_kl`` [B, T] for the full KL."""
        micro = self.micro_batching("log_prob")
        options = {"temperature": self.temperature, "with_entropy": True, "with_full_kl": self.full_kl}
        found = self.engine.infer(batch, micro, **options, **self._cut_as_the_teacher())
        columns = {"old_log_probs": found["log_prob"], "entropys": found["entropy"]}
        if self.full_kl:
            columns["full_kl"] = found["full_kl"]
        return DataProto(columns)

    @register(Dispatch.DATA_PARALLEL)
    @phase("ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [B, T], and the hidden states ``ref_hidden`` [B, T, H] for the full KL."""
        micro = self.micro_batching("ref")
        reference = self.engine if self._is_reference else self.reference
        with reference.base_model():
            found = reference.infer(
                batch, micro, temperature=self.temperature, with_entropy=False, with_hidden=self.full_kl
            )
        columns = {"ref_log_prob": found["log_prob"]}
        if self.full_kl:
            columns["ref_hidden"] = found["hidden"]
        return DataProto(columns)

    @register(Dispatch.DATA_PARALLEL)
    @phase("teacher")
    def compute_teacher(self, batch: DataProto) -> DataProto:
        """Return the columns of ``teacher_columns``, of the actor with its adapters off."""
        with self.engine.base_model():
            return teacher_columns(
                self.engine,
                batch,
                micro=self.micro_batching("teacher"),
                teacher=self.config.teacher,
                temperature=self.temperature,
                **cut_passes(self),
            )

    @register(Dispatch.DATA_PARALLEL)
    @phase("update_actor")
    def update_actor(self, mini_batch: DataProto) -> dict[str, float] | DataProto:
        """Take one optimizer step on a mini-batch whose ``meta_info`` has the global denominators.

        Return its metrics. With ``rows`` in ``meta_info``, return ``update_log_probs`` [B, T], the log-probs
        that the loss saw, and the metrics in ``meta_info["metrics"]``.
        """
        if "rows" not in mini_batch.meta_info:
            return self._update(mini_batch, self._objective(mini_batch))
        return self._recorded(mini_batch, {"log_prob": "update_log_probs"})

    @register(Dispatch.DATA_PARALLEL)
    @phase("update_actor")
    def update_actor_on_policy(self, batch: DataProto) -> DataProto:
        """Take the only optimizer step of an iteration, on samples without ``old_log_probs``.

        Return ``old_log_probs`` and ``entropys`` [B, T] from before the step, with the metrics of
        ``update_actor`` in ``meta_info["metrics"]``.
        """
        return self._recorded(batch, {"log_prob": "old_log_probs", "entropy": "entropys"})

    def _recorded(self, batch: DataProto, names: dict[str, str]) -> DataProto:
        recorder = Recorder(batch, names)
        metrics = self._update(recorder.mini_batch, recorder.watch(self._objective(batch)))
        # with a pipeline only the last stage saw the outputs
        return DataProto(self.engine.agree(recorder.columns()), {}, {"metrics": metrics})

    def _objective(self, mini_batch: DataProto) -> Loss:
        return actor_objective(
            self.section.actor,
            n_tokens=mini_batch.meta_info["n_tokens"],
            n_seqs=mini_batch.meta_info["n_seqs"],
            max_response_length=self.config.data.max_response_length,
            teacher_coef=self.config.teacher.coef if self.teaches_in_loss else None,
            has_reward=has_reward(self.config),
        )

    def _update(self, mini_batch: DataProto, loss: Loss) -> dict[str, float]:
        return self.train_on(
            mini_batch,
            loss,
            self.section.actor,
            self.micro_batching("actor"),
            temperature=self.temperature,
            with_entropy=True,
            with_full_kl=self.full_kl_loss,
            **({"with_teacher": True} if self.teaches_in_loss else self._cut_as_the_teacher()),
        )

    def _cut_as_the_teacher(self) -> dict[str, int]:
        """Return the argument of passes whose log-probs are compared with the teacher's."""
        return cut_passes(self) if teaches_by_advantages(self.config) else {}


def _counting(advanced: Callable[[int, int, int], None] | None) -> Advanced:
    """Return a callback of an engine that passes sums to ``advanced``, at most twice a second."""
    sums, reported = [0.0, 0.0], 0.0

    def count(done: float, tokens: float) -> None:
        nonlocal reported
        sums[:] = sums[0] + done, sums[1] + tokens
        if advanced is not None and (now := time.monotonic()) - reported > 0.5:
            reported = now
            advanced(0, round(sums[0]), round(sums[1]))

    return count


def _mode(prompts: DataProto) -> str:
    return prompts.meta_info.get("mode", "train")


def _uids(prompts: DataProto) -> list[str]:
    return [str(uid) for uid in prompts.non_tensor_batch["uid"]]  # torch.load refuses numpy's strings


def _first_difference(found: list[str], expected: list[str]) -> str | None:
    """Return the first row whose uid differs, in words; None if there is none."""
    for row, (uid, other) in enumerate(zip_longest(found, expected)):
        if uid != other:
            return f"row {row} is {uid!r}, expected {other!r}"
    return None

"""``TeacherWorker``: the distributions of a frozen model at the tokens of the policy's samples."""

from __future__ import annotations

from typing import Any, ClassVar

from strop.config.backends import ENGINES
from strop.config.roles import teacher_hidden
from strop.controller.group import Dispatch, register
from strop.protocol import DataProto
from strop.workers.base import RoleWorker
from strop.workers.memory import phase


class TeacherWorker(RoleWorker):
    """Hold a teacher; it computes as the policy does, at the rollout's temperature."""

    shared_passes: ClassVar = {"compute_teacher": "teacher"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy's tokenizer, whose words are compared, and the teacher."""
        policy = self.config.actor_rollout_ref.model
        self.tokenizer = self.load_tokenizer(self.config.data.tokenizer or policy.path)
        self.engine = self.build_engine(
            "policy",
            self.model_options(self.config.teacher.model),
            name="teacher",
            section=ENGINES[self.strategy].section_of(self.config, "teacher"),
            compute_dtype=policy.compute_dtype,
            packed=policy.use_remove_padding,
            compile=policy.compile,
            trained=None,
        )

    @register(Dispatch.DATA_PARALLEL)
    @phase("teacher")
    def compute_teacher(self, batch: DataProto) -> DataProto:
        """Return the columns of ``teacher_columns``."""
        return teacher_columns(self, batch)


def words_of(tokenizer: Any) -> int:
    """Return the number of words that a tokenizer makes: one more than its largest id."""
    return 1 + max(tokenizer.get_vocab().values())


def teacher_columns(worker: RoleWorker, batch: DataProto) -> DataProto:
    """Return ``teacher_log_prob`` and ``teacher_entropy`` [B, T], and what ``teacher.kl`` compares.

    That is ``teacher_hidden`` [B, T, H] for whole distributions, or ``teacher_ids`` [B, T, K] and
    ``teacher_top`` [B, T, K + 1], log-probs of the K likeliest words and of all others together.
    """
    config, teacher, options = worker.config, worker.config.teacher, {}
    if teacher_hidden(config):
        options["with_hidden"] = True
    elif teacher.top_k is not None:
        options["top_k"] = teacher.top_k
    if "whole_logits" in ENGINES[worker.strategy].offers:
        options["words"] = words_of(worker.tokenizer)
    temperature = config.actor_rollout_ref.rollout.temperature
    found = worker.engine.infer(batch, worker.micro_batching("teacher"), temperature=temperature, **options)
    columns = {"teacher_log_prob": found["log_prob"], "teacher_entropy": found["entropy"]}
    if "hidden" in found:
        columns["teacher_hidden"] = found["hidden"]
    if "top" in found:
        columns |= {"teacher_ids": found["top_ids"].int(), "teacher_top": found["top"]}
    return DataProto(columns)

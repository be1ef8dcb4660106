"""``TeacherWorker``: the distributions of frozen models at the tokens of the policy's samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.config.backends import ENGINES
from strop.config.keys import longest_row
from strop.config.roles import teacher_models
from strop.config.schema import Config
from strop.config.schema.teacher import Teacher, teachers_of
from strop.controller.group import Dispatch, register
from strop.engines.base import Engine
from strop.engines.micro_batches import MicroBatching, masked_row, require_no_tree
from strop.models.folder import words_of
from strop.protocol import DataProto
from strop.workers.base import RoleWorker, options_of
from strop.workers.memory import phase

Judge = Callable[[DataProto], DataProto]
"""Return the columns of a teacher, of rows of samples."""


class TeacherWorker(RoleWorker):
    """Hold the teachers; they compute as the policy does, at the rollout's temperature."""

    shared_passes: ClassVar = {"compute_teacher": "teacher"}

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy's tokenizer, whose words are compared, and the teachers; wait for servers."""
        policy = self.config.actor_rollout_ref.model
        self.tokenizer = self.load_tokenizer(self.config.data.tokenizer or policy.path)
        self.words = common_words(self.config, self.tokenizer)
        self._scorers: list[Any] = []
        self._judges = [self._judge(teacher) for teacher in teachers_of(self.config.teacher)]

    def _judge(self, teacher: Teacher) -> Judge:
        policy = self.config.actor_rollout_ref
        if teacher.model is None:
            from strop.rollout.http.scorer import Scorer  # needs httpx2

            http = policy.rollout.get("http").model_dump()
            own = {"urls": teacher.servers, "token_env": self.config.teacher.token_env}
            own["min_servers"] = min(http["min_servers"], len(teacher.servers))  # the rollout may have more
            settings = SimpleNamespace(**{**http, **own})
            self._scorers.append(Scorer(settings, self.tokenizer, longest_row(self.config.data)[0]))
            return partial(_scores, self._scorers[-1], self.words)
        self.engine = self.build_engine(
            "policy",
            self.model_options(teacher.model),
            name="teacher",
            section=ENGINES[self.strategy].section_of(self.config, "teacher"),
            **options_of(policy.model, "actor_rollout_ref.model", trained=None),
        )
        return partial(
            teacher_columns,
            self.engine,
            micro=self.micro_batching("teacher"),
            teacher=self.config.teacher,
            temperature=policy.rollout.temperature,
            **cut_passes(self),
        )

    def close(self) -> None:
        """End the requests to servers."""
        for scorer in getattr(self, "_scorers", ()):
            scorer.close()

    @register(Dispatch.DATA_PARALLEL)
    @phase("teacher")
    def compute_teacher(self, batch: DataProto) -> DataProto:
        """Return the columns of ``teacher_columns``, each row's by its teacher (column ``teacher``)."""
        # a padding id of the policy's may be beyond the teacher's embeddings
        known_BL = batch.batch["input_ids"].clamp(max=self.words - 1)
        batch = DataProto({**batch.batch, "input_ids": known_BL})
        if len(self._judges) == 1:
            return self._judges[0](batch)
        whole: dict[str, Tensor] = {}
        for number, judge in enumerate(self._judges):
            rows = (batch.batch["teacher"][:, 0] == number).nonzero()[:, 0]
            # every rank takes part in every pass: one without rows with a masked one
            for name, column in judge(batch[rows] if len(rows) else masked_row(batch)).batch.items():
                kept = whole.get(name, column.new_zeros(len(batch), *column.shape[1:]))
                if column.dim() == 3:  # hidden states of several widths
                    width = max(column.shape[2], kept.shape[2])
                    column, kept = (pad(one, (0, width - one.shape[2])) for one in (column, kept))
                whole[name] = kept.index_copy(0, rows, column[: len(rows)])
        if self._scorers:
            whole.pop("teacher_entropy", None)  # servers do not tell it
        return DataProto(whole | {"teacher": batch.batch["teacher"]})


def _scores(scorer: Any, words: int, batch: DataProto) -> DataProto:
    """Return ``teacher_log_prob`` [B, T] by servers; 0 for an id that is none of ``words``."""
    require_no_tree(batch, "teacher.servers", "name a model")
    columns = batch.batch
    mask_BT, real_BL = columns["response_mask"], columns["attention_mask"].bool()
    mask_BT = mask_BT * (columns["responses"] < words)
    rows = [ids[real].tolist() for ids, real in zip(columns["input_ids"], real_BL, strict=True)]
    found_BL = torch.zeros(real_BL.shape)
    for row, real_L, scores in zip(found_BL, real_BL, scorer.score(rows), strict=True):
        row[real_L.nonzero()[1:, 0]] = scores  # a row's first id has none
    return DataProto({"teacher_log_prob": found_BL[:, -mask_BT.shape[1] :] * mask_BT})


def common_words(config: Config, tokenizer: Any) -> int:
    """Return the number of words that policy and teachers have."""
    teachers = [model.path for model in teacher_models(config).values()]
    return words_of(tokenizer, [config.actor_rollout_ref.model.path, *teachers])


def cut_passes(worker: Any) -> dict[str, int]:
    """Return the argument by which passes cut output layers to the worker's ``words``, if its engine can."""
    return {"words": worker.words} if "whole_logits" in ENGINES[worker.strategy].offers else {}


def teacher_columns(
    engine: Engine,
    batch: DataProto,
    *,
    micro: MicroBatching,
    teacher: Any,
    temperature: float = 1.0,
    **options: Any,
) -> DataProto:
    """Return ``teacher_log_prob`` and ``teacher_entropy`` [B, T], and what ``teacher.kl`` compares.

    That is ``teacher_hidden`` [B, T, H] for whole distributions, or ``teacher_ids`` [B, T, K] and
    ``teacher_top`` [B, T, K + 1], log-probs of the K likeliest words and of all others together.
    """
    if teacher.top_k is not None:
        options["top_k"] = teacher.top_k
    elif teacher.kl != "sampled":
        options["with_hidden"] = True
    found = engine.infer(batch, micro, temperature=temperature, **options)
    columns = {"teacher_log_prob": found["log_prob"], "teacher_entropy": found["entropy"]}
    if "hidden" in found:
        columns["teacher_hidden"] = found["hidden"]
    if "top" in found:
        columns |= {"teacher_ids": found["top_ids"].int(), "teacher_top": found["top"]}
    return DataProto(columns)

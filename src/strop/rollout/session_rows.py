"""Columns of batches whose samples are sessions of agent programs: each session is one row.

Shapes: B prompts of P columns, R = B x n sessions of T tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strop.agents.chat import ChatFormat
from strop.agents.program import Outcome
from strop.agents.session import Session
from strop.algorithms import token_tree
from strop.algorithms.token_tree import Row, plain
from strop.columns import ENDED_BY
from strop.data.pictures.parts import digests_of
from strop.errors import TrainingError
from strop.protocol import DataProto, sequence_columns
from strop.rollout.base import Samples, SamplingParams, answer
from strop.rollout.in_flight import with_files

if TYPE_CHECKING:
    from torch import Tensor


def columns_of(
    prompts: DataProto,
    params: SamplingParams,
    sessions: Sequence[Session],
    outcomes: Sequence[Outcome],
    form: ChatFormat,
    *,
    with_versions: bool,
    waiting: float,
    pad_token_id: int,
    **options: Any,
) -> DataProto:
    """Return the columns of ``answer``, and those of turns, for the sessions of B prompts.

    ``outcomes`` are those of their programs, ``waiting`` is the share of time in which the engine waited for
    them; ``options`` are further ones of ``answer``.
    """
    T = params.max_tokens
    rows = [token_tree.row_of([]) if one.ended_by == "error" else one.row() for one in sessions]
    for session, row in zip(sessions, rows, strict=True):
        if session.ended_by != "error" and sum(row.sampled) != session.n_sampled - session.n_dropped:
            raise TrainingError(
                f"a session has {sum(row.sampled)} sampled tokens in its row, and the engine gave it "
                f"{session.n_sampled - session.n_dropped}"
            )
    shown = _with_prompts(prompts.repeat(params.n), sessions, pad_token_id)
    samples, versions = _samples(sessions, rows, T, pad_token_id)
    found = answer(shown, replace(params, n=1), samples, pad_token_id=pad_token_id, **options)
    more: dict[str, Any] = _counts(sessions, rows, waiting)
    if with_versions:
        more["rollout_versions"] = versions
    ended = list(zip(sessions, outcomes, strict=True))
    more["environment_scores"] = torch.stack(
        [_scores(*end, row, T) for end, row in zip(ended, rows, strict=True)]
    )
    if form.pictures is not None:
        found = found.union(_of_pictures(sessions, rows, T))
    texts = np.array([_conversation(form, *end) for end in ended], object)
    return found.union(DataProto(more, {"conversation": texts}))


def _with_prompts(prompts: DataProto, sessions: Sequence[Session], pad_id: int) -> DataProto:
    """Return the rows [R, P] with the contexts that their sessions begin with."""
    ids_RP, mask_RP = prompts.batch["input_ids"].clone(), prompts.batch["attention_mask"].clone()
    images_RI = images_of(prompts).clone()
    width = ids_RP.shape[1]
    for row, session in enumerate(sessions):
        if session.prompt is not None and session.ended_by != "error":
            images, length = digests_of(session.prompt.images_at), len(session.prompt.ids)
            images_RI[row] = torch.tensor([*images, *[0] * (images_RI.shape[1] - len(images))])
            ids_RP[row], mask_RP[row] = pad_id, 0
            ids_RP[row, width - length :] = torch.tensor(session.prompt.ids)
            mask_RP[row, width - length :] = 1
    columns = sequence_columns(ids_RP, mask_RP)
    if "images" in prompts.batch:
        columns["images"] = images_RI
    return DataProto({**prompts.batch, **columns}, prompts.non_tensor_batch, prompts.meta_info)


def images_of(prompts: DataProto) -> Tensor:
    """Return the column ``images``; without pictures one of no width."""
    return prompts.batch.get("images", torch.zeros(len(prompts), 0, dtype=torch.long))


def _of_pictures(sessions: Sequence[Session], rows: Sequence[Row], T: int) -> DataProto:
    """Return the pictures of the rows' tokens, and the files of all that their requests sent."""
    at_RT = torch.zeros(len(rows), T, dtype=torch.long)
    for at_T, session, row in zip(at_RT, sessions, rows, strict=True):
        if row.ids:
            at_T[: len(row.ids)] = torch.tensor(session.images_at())
    return with_files(at_RT, [session.pictures for session in sessions])


def _samples(sessions: Sequence[Session], rows: Sequence[Row], T: int, pad_id: int) -> tuple[Samples, Tensor]:
    """Return the tokens of sessions, and the version that sampled each token [R, T]."""
    ids, follows = torch.full((len(rows), T), pad_id), plain(len(rows), T)
    log_probs, sampled = torch.zeros(len(rows), T), torch.zeros(len(rows), T, dtype=torch.bool)
    versions = torch.full((len(rows), T), -1, dtype=torch.int32)
    for number, (session, row) in enumerate(zip(sessions, rows, strict=True)):
        if count := len(row.ids):
            ids[number, :count], follows[number, :count] = torch.tensor(row.ids), torch.tensor(row.follows)
            sampled[number, :count] = torch.tensor(row.sampled)
            nodes, own = session.ordered, sampled[number]
            log_probs[number, own] = torch.tensor([one for node in nodes for one in node.log_probs])
            versions[number, own] = torch.tensor([one for node in nodes for one in node.versions]).int()
    lengths = torch.tensor([len(row.ids) for row in rows])
    truncated = torch.tensor([one.ended_by == "length" for one in sessions])
    return Samples(ids, log_probs, lengths, truncated, sampled, follows), versions


def _counts(sessions: Sequence[Session], rows: Sequence[Row], share: float) -> dict[str, Tensor]:
    """Return numbers of each session as columns."""
    nodes = [[] if one.ended_by == "error" else one.ordered for one in sessions]
    answers = [[node.answer for node in own if node.answer] for own in nodes]
    counts = {
        "n_turns": [len(own) for own in nodes],
        "n_calls": [sum(len(one.calls) for one in own) for own in answers],
        "n_malformed": [sum(bool(one.malformed) for one in own) for own in answers],
        "n_errors": [int(one.ended_by == "error") for one in sessions],
        "n_timeouts": [int(one.is_late) for one in sessions],
        "n_other_stop": [0] * len(sessions),
        "n_branches": [_branches(row) for row in rows],
        "n_overlapping": [int(one.is_overlapping) for one in sessions],
        "n_replayed": [one.n_replayed for one in sessions],
        "n_abandoned": [one.n_abandoned for one in sessions],
    }
    found = {name: torch.tensor(values, dtype=torch.int16) for name, values in counts.items()}
    found["ended_by"] = torch.tensor([ENDED_BY.index(one.ended_by) for one in sessions], dtype=torch.int8)
    last = [own[-1] if own else None for own in nodes]
    cut = [bool(node) and node.is_cut and node.request.max_tokens == len(node.ids) for node in last]
    return {**found, "turn_cut": torch.tensor(cut), "agent_waiting": torch.full((len(sessions),), share)}


def _scores(session: Session, outcome: Outcome, row: Row, T: int) -> Tensor:
    """Return the score that a program returned, on the last sampled token [T]; NaN without."""
    if "score" not in outcome or session.ended_by == "error":
        return torch.full((T,), math.nan)
    scores = torch.zeros(T)
    last = max((place for place, own in enumerate(row.sampled) if own), default=0)
    scores[last] = outcome["score"]
    return scores


def _branches(row: Row) -> int:
    """Return the number of sequences of a row: its tokens that no other one follows."""
    followed = {before for before in row.follows if before >= 0}
    return sum(place not in followed for place in range(len(row.ids)))


def _conversation(form: ChatFormat, session: Session, outcome: Outcome) -> str:
    """Return the turns of a session, and what its program returned, as JSON."""
    turns, messages = [], []
    ordered = session.ordered
    for node in ordered:
        assert node.answer is not None
        calls = [{"name": call.name, "arguments": call.arguments} for call in node.answer.calls]
        after = next((other for other in ordered if other.parent is node), None)
        answers = after.request.messages[len(node.history) :] if after else []
        turns.append({"text": form.plain(node.ids), "calls": calls, "answers": answers})
        messages = [*node.request.messages, node.message()]
    if session.ended_by == "error":
        return json.dumps({"turns": turns, "error": session.error}, ensure_ascii=False)
    found: dict[str, Any] = {"turns": turns, "messages": messages}
    if (text := outcome.get("response")) is not None:
        found["response"] = text
    if "score" in outcome:
        found["parts"] = outcome["parts"]
    return json.dumps(found, ensure_ascii=False)

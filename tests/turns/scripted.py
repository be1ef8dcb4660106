"""A policy that says what a script says: samples of several turns without a model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import pytest
import torch

from strop.columns import ENDED_BY
from strop.config.load import load_config
from strop.data.loader import collate
from strop.data.prompts import AUTO, encode_prompts
from strop.environments import pool
from strop.environments.loading import Environments, load_environments
from strop.environments.pool import EnvironmentPool
from strop.passed import passing
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams
from strop.rollout.episodes import Episodes
from strop.rollout.in_flight import InFlight
from strop.rollout.turn_format import TurnFormat

from byte_tokenizer import CHATML, STOP, byte_tokenizer

KEYS = ["actor_rollout_ref.model.path=m", "data.train_files=f"]


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the byte tokenizer's template writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def environments_of(*tools: Any, **environments: Any) -> Environments:
    """Load classes and functions of the test; the keyword ``own`` is the environment of all rows."""
    for found in (*tools, *environments.values()):  # their processes need not import the test, and torch
        cloudpickle.register_pickle_by_value(sys.modules[found.__module__])
    functions = {f"function:{found.__name__}-{place}": found for place, found in enumerate(tools)}
    named = {f"function:{name}-0": found for name, found in environments.items()}
    path = {"" if name == "own" else name: f"function:{name}-0" for name in environments}
    settings = settings_of(path=path, tools=list(functions))
    with passing(functions | named):
        found = load_environments(settings)
    assert found is not None
    return found


def settings_of(**values: Any) -> Any:
    """Return the section ``environment`` with some values."""
    return load_config(KEYS).environment.model_copy(update=values)


class Script:
    """Samples that say their scripts, and what environments make of them."""

    def __init__(
        self,
        environments: Environments,
        scripts: Sequence[Sequence[str | Sequence[int]]],
        *,
        rows: Mapping[str, Sequence[Any]] | None = None,
        template: str = CHATML,
        n: int = 1,
        max_tokens: int = 2000,
        prompt: Any = "Hi",
        truncation: str = "error",
        data: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.tokenizer = byte_tokenizer(template)
        own = {"truncation": truncation, **(data or {})}
        config = load_config([*KEYS, *(f"data.{name}={value}" for name, value in own.items())])
        config = config.model_copy(update={"environment": settings_of(**settings)})
        self.form = TurnFormat(config, environments, self.tokenizer, [STOP])
        self.pool = EnvironmentPool(environments, config.environment)
        self.episodes = Episodes(environments, config.environment, self.form, self.pool)
        self.scripts, self.turn = scripts, [0] * len(scripts)
        prompts = len(scripts) // n
        columns = {"prompt": [prompt] * prompts, "ground_truth": ["x"] * prompts, **(rows or {})}
        each = [{name: column[row] for name, column in columns.items()} for row in range(prompts)]
        tools = [json.dumps(environments.tools_of(row)) for row in each]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = encode_prompts(
            [messages] * prompts, self.tokenizer, AUTO, [text if text != "[]" else None for text in tools]
        )
        self.prompt_ids = ids[0]
        each = [{"input_ids": torch.tensor(one), **row} for one, row in zip(ids, each, strict=True)]
        seeds = DataProto({"seeds": torch.arange(7, 7 + len(scripts)).view(prompts, n)})
        self.data = collate(each, pad_token_id=0, max_prompt_length=100 + max(map(len, ids))).union(seeds)
        self.batch = InFlight(
            self.data,
            SamplingParams(max_tokens=max_tokens, n=n),
            **self.episodes.options,
        )
        self.episodes.begin(self.batch)

    def decode(self, rows: Sequence[int] | None = None) -> None:
        """Say the next turn of each sample that is to be decoded."""
        for row in self.batch.decoding.nonzero()[:, 0].tolist():
            if rows is not None and row not in rows:
                continue
            said = self.scripts[row][self.turn[row]]
            self.turn[row] += 1
            ids = (
                [*self.tokenizer(said, add_special_tokens=False)["input_ids"], STOP]
                if isinstance(said, str)
                else [*said]
            )
            cut = ids[: self.batch.room(row)]
            new = Samples(
                torch.tensor([cut]),
                torch.full((1, len(cut)), -1.0),
                torch.tensor([len(cut)]),
                torch.tensor([cut[-1] != STOP]),
            )
            self.batch.add(torch.tensor([row]), new, 1)

    def play(self) -> DataProto:
        """Return the finished batch."""
        try:
            self.episodes.complete([self.batch], self.decode)
            turns = self.episodes.columns(self.batch)
            return self.batch.result(pad_token_id=0, eos_token_ids=[STOP], hidden_token_ids=[]).union(turns)
        finally:
            self.pool.close()


def cut_off_once(monkeypatch: pytest.MonkeyPatch, is_late: Callable[[Any, bool], bool]) -> None:
    """Let the deadline of a request pass once ``is_late`` is true of it, and that of no other one.

    ``is_late`` gets the request, and True if its episode has begun in its process.
    """
    plain = pool._Process._receive  # polled while a request is waited for

    def receive(self: Any) -> None:
        for request in self._in_flight.values():
            if is_late(request, self._is_begun(request)):
                request.deadline = 0.0
        plain(self)

    monkeypatch.setattr(pool._Process, "_receive", receive)


def calls(name: str) -> Callable[[Any, bool], bool]:
    """Return a function for ``cut_off_once``: of turns that call a method, once they are begun."""

    def is_late(request: Any, is_begun: bool) -> bool:
        turn = request.content.get("turn", {"calls": []})
        return is_begun and any(one["name"] == name for one in turn["calls"])

    return is_late


def resumed(before: Script, environments: Environments, **options: Any) -> Script:
    """Return the samples in another engine, as a checkpoint has them."""
    after, file = Script(environments, before.scripts, **options), io.BytesIO()
    torch.save(before.batch.state(), file)
    file.seek(0)
    after.batch.restore(torch.load(file, weights_only=True))
    after.turn = list(before.turn)
    return after


def conversation(result: DataProto, row: int = 0) -> list[dict[str, Any]]:
    """Return the turns of a sample."""
    return json.loads(result.non_tensor_batch["conversation"][row])["turns"]


def ended_by(result: DataProto) -> list[str]:
    """Return the reason of each sample's end."""
    return [ENDED_BY[code] for code in result.batch["ended_by"].tolist()]


def answers(result: DataProto, row: int = 0) -> list[str]:
    """Return the texts of the answers that were inserted into a sample."""
    return [message["content"] for turn in conversation(result, row) for message in turn["answers"]]

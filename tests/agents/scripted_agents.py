"""Sessions of agent programs with a policy that says what a script says, without a model."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch

from strop.agents.chat import ChatFormat, read_request
from strop.agents.program import ProgramPool, load_program
from strop.agents.session import Node, Session
from strop.config.load import load_config
from strop.data.loader import collate
from strop.data.prompts import encode_prompts
from strop.passed import passing
from strop.protocol import DataProto
from strop.rollout.agents import AgentRollout
from strop.rollout.base import GenerationStopped, Samples, SamplingParams
from strop.rollout.in_flight import InFlight

from byte_tokenizer import CHATML, STOP, byte_tokenizer

KEYS = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
HI = [{"role": "user", "content": "Hi"}]


def ids_of(said: str | Sequence[int]) -> list[int]:
    """Return the ids of an answer: of a text with the stop token."""
    if not isinstance(said, str):
        return [*said]
    return [*byte_tokenizer()(said, add_special_tokens=False)["input_ids"], STOP]


def new_session(template: str = CHATML, *, room: int = 2000, widest: int = 200, **options: Any) -> Session:
    """Return a session without a request, whose row has another prompt than the requests."""
    form = ChatFormat(load_config(KEYS), byte_tokenizer(template), [STOP])
    settings = {"seed": 7, "max_calls": 64, "sampling": {"temperature": 1.0, "top_p": 1.0}, **options}
    return Session(form, ["a row's prompt"], room=room, widest=widest, **settings)


def answer(session: Session, said: str | Sequence[int], *nodes: Node) -> None:
    """Let the policy say something in each of some open nodes."""
    for node in session.begin(nodes):
        node.ids = ids_of(said)
        node.log_probs, node.versions = [-1.0] * len(node.ids), [0] * len(node.ids)
        node.is_stopped = node.ids[-1] == STOP
        session.n_sampled += len(node.ids)
        session.answer(node)


def call(session: Session, said: str | Sequence[int], messages: Any, **more: Any) -> Node:
    """Return the node of a request that the policy has answered."""
    node = session.submit(read_request({"messages": messages, **more}))
    answer(session, said, node)
    return node


class ScriptedEngine:
    """Says, for each context, what a function of its ids and its seed returns; at most the row's limit."""

    eos_token_ids = (STOP,)

    def __init__(self, says: Callable[[list[int], int | None], str | Sequence[int]]) -> None:
        self.says, self.contexts = says, []
        self.special_ids = {"pad_token_id": 0, "eos_token_ids": [STOP], "hidden_token_ids": []}
        self.advanced = None
        self.stopping = threading.Event()

    def close(self) -> None:
        """Nothing runs elsewhere."""

    def columns_of(self, batch: Any) -> DataProto:
        return DataProto()

    def require_going_on(self) -> None:
        if self.stopping.is_set():
            raise GenerationStopped

    @contextlib.contextmanager
    def waves(self, params: SamplingParams) -> Any:
        yield self._wave

    def _wave(self, batches: Sequence[InFlight], version: int) -> None:
        self.contexts.append([])
        for batch in batches:
            for row in batch.decoding.nonzero()[:, 0].tolist():
                context = batch.prompt_ids[row].tolist()
                self.contexts[-1].append(context)
                said = ids_of(self.says(context, batch.seeds[row] if batch.seeds else None))
                said = said[: batch.room(row)]
                columns = ([said], [[-1.0] * len(said)], [len(said)], [said[-1] != STOP])
                batch.add(torch.tensor([row]), Samples(*map(torch.tensor, columns)), version)


class Agents:
    """A rollout of sessions of ``program``, a function of the test or a command."""

    def __init__(
        self,
        program: Any,
        says: Callable[[list[int], int | None], str | Sequence[int]] = lambda context, seed: "A",
        *,
        prompts: int = 1,
        n: int = 1,
        max_tokens: int = 2000,
        **settings: Any,
    ) -> None:
        config = load_config(KEYS)
        path = {"command": program} if isinstance(program, str) else {"path": "function:program-0"}
        config = config.model_copy(update={"agent": config.agent.model_copy(update={**path, **settings})})
        self.config, self.prompts, self.n = config, prompts, n
        if not isinstance(program, str):  # its process need not import the test, and torch
            cloudpickle.register_pickle_by_value(sys.modules[program.__module__])
        with passing({} if isinstance(program, str) else {"function:program-0": program}):
            loaded = load_program(config.agent)
        assert loaded is not None
        self.pool = ProgramPool(loaded, config.agent)
        self.engine = ScriptedEngine(says)
        self.tokenizer = byte_tokenizer()
        spec: Any = SimpleNamespace(
            config=config, tokenizer=self.tokenizer, program_pool=self.pool, rank=0, picture_texts=None
        )
        self.rollout = AgentRollout(self.engine, spec)
        self.params = SamplingParams(max_tokens=max_tokens, n=n)

    def batch(self, **columns: Any) -> DataProto:
        """Return prompts, all of them Hi; the column number counts them."""
        ids = encode_prompts([HI], self.tokenizer)[0]
        rows = [
            {
                "input_ids": torch.tensor(ids),
                "prompt": HI,
                "uid": str(row),
                "number": row,
                **{name: values[row] for name, values in columns.items()},
            }
            for row in range(self.prompts)
        ]
        seeds = torch.arange(7, 7 + self.prompts * self.n).view(self.prompts, self.n)
        return collate(rows, pad_token_id=0, max_prompt_length=200).union(DataProto({"seeds": seeds}))

    def play(self, **columns: Any) -> DataProto:
        """Return the samples of a batch."""
        return self.rollout.generate(self.batch(**columns), self.params)

    def close(self) -> None:
        self.pool.close()


@contextlib.contextmanager
def agents(*given: Any, **options: Any) -> Any:
    """Yield ``Agents``, and end their processes."""
    made = Agents(*given, **options)
    try:
        yield made
    finally:
        made.close()

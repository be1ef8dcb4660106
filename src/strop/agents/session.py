"""Sessions: the requests of a program and their answers, as nodes of a tree and as one row of tokens.

A request continues the node whose messages are the longest beginning of its own: its context is that node's
ids and the ids that the chat template writes after them. So no sampled token is decoded and tokenized again.
Other requests begin a branch from nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.chat import (
    TOO_LONG,
    ChatAnswer,
    ChatFormat,
    ChatRequest,
    Refusal,
    canonical,
    digest_of,
    split_thinking,
)
from strop.algorithms import token_tree
from strop.algorithms.token_tree import NOTHING, PROMPT, Row, row_of
from strop.data.bridge import call_id, call_message
from strop.data.pictures.parts import Shown, digests_of, joined
from strop.pictures import Picture


@dataclass(eq=False)
class Node:
    """A request with its answer, or as much as there is of it."""

    parent: Node | None
    request: ChatRequest
    inserted: list[int]
    """Ids after the parent's answer; of a node without a parent the whole context."""
    key: str
    """Digest of what decides the answer, and the number of equal requests before it."""
    seed: int | None
    """None: greedy."""
    images_at: tuple[int, ...] = ()
    """Pictures of ``inserted``, as ``Shown`` has them."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_stopped: bool = False
    """The last id is a stop token."""
    is_cut: bool = False
    """A limit ended the answer: it has no stop token, and no text of the request's stops."""
    answer: ChatAnswer | None = None
    history: tuple[str, ...] = ()
    """The request's messages and the answer, in canonical form; nothing before it is there."""
    n_claims: int = 1
    """Requests for it, retries included, whose clients wait or have got the answer."""
    retry_until: float = 0.0
    """Time until which a client that is gone may send the request again."""

    @property
    def is_claimed(self) -> bool:
        """True if a client waits for it, or has got the answer."""
        return self.n_claims > 0

    def is_awaited(self, now: float) -> bool:
        """Return True if a client waits for it, or may do so again soon."""
        return self.is_claimed or now < self.retry_until

    @property
    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        found, node = [], self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def shown(self) -> Shown:
        """Tokens and pictures that the chat template wrote for this node."""
        return Shown(self.inserted, self.images_at)

    @property
    def whole(self) -> Shown:
        """All ids before the answer; a node keeps those that it adds to its parent's."""
        *before, own = self.path
        return joined(*(one for node in before for one in (node.shown, Shown(node.ids))), own.shown)

    @property
    def context(self) -> list[int]:
        """The ids of ``whole``."""
        return self.whole.ids

    @property
    def call_ids(self) -> list[str]:
        """Ids of the answer's calls."""
        count = len(self.answer.calls) if self.answer else 0
        return [call_id(self.key, place) for place in range(count)]

    def message(self) -> dict[str, Any]:
        """Return the answer as a message, with arguments as JSON."""
        assert self.answer is not None
        pairs = zip(self.answer.calls, self.call_ids, strict=True)
        calls = [call._replace(id=identity) for call, identity in pairs]
        if calls:
            return call_message(calls, self.answer.content, as_text=True)
        return {"role": "assistant", "content": self.answer.content}


class Session:
    """The requests of one sample's program, and their answers."""

    def __init__(
        self,
        form: ChatFormat,
        prompt: Sequence[str],
        *,
        seed: int | None,
        room: int,
        widest: int,
        max_calls: int,
        sampling: Mapping[str, float],
        most_pictures: int = 0,
    ) -> None:
        """Begin without a request.

        Args:
            form: the chat template.
            prompt: the row's prompt in canonical form; a request of it draws with the sample's own seed.
            seed: of the sample; None: greedy.
            room: most tokens of the row after its prompt.
            widest: most tokens of a context that becomes the row's prompt.
            max_calls: most requests that are answered.
            sampling: temperature and top_p of the run; requests may say the same.
            most_pictures: of a context that becomes the row's prompt.
        """
        self._form, self._prompt, self._seed = form, tuple(prompt), seed
        self._room, self._widest, self._max_calls = room, widest, max_calls
        self._sampling, self._most_pictures = sampling, most_pictures
        self.recorded: dict[str, dict[str, Any]] = {}
        """Answers, and beginnings of answers, of a program that was started before, by key."""
        self.prompt: Shown | None = None
        """The context that is the row's prompt; None: that of the data, from which no sequence begins."""
        self.is_resumed = False
        self.restart()

    def restart(self) -> None:
        """Forget the nodes: the program is started again, and gets the recorded answers."""
        self.nodes: list[Node] = []
        """Answered, in the order of the answers."""
        self.open: list[Node] = []
        self.pictures: dict[int, Picture] = {}
        """Pictures of all requests."""
        self.ended_by, self.error = "", ""
        self.is_late = False
        """Its program was past its deadline."""
        self.refused_by = ""
        """The limit for which a request was refused, a word of ``ENDED_BY``."""
        self.is_overlapping = False
        self._counts: Counter[str] = Counter()
        self.n_calls = self.n_replayed = self.n_abandoned = self.n_sampled = self.n_dropped = 0

    def submit(self, request: ChatRequest) -> Node:
        """Return the node of a request: answered, if its answer is recorded, else open.

        Raises ``Refusal`` if the session has ended, for parameters of sampling that are not the run's, what
        the chat template cannot show, more than ``max_calls``, and a context that does not fit.
        """
        if self.ended_by:
            raise Refusal(403, "the session has ended")
        for name, value in request.sampling.items():
            if value not in (self._sampling[name], 1.0):
                raise Refusal(
                    400, f"{name}={value:g}: the run samples with {self._sampling[name]:g}; leave it out"
                )
        if self.n_calls >= self._max_calls:
            self.refused_by = "turns"
            raise Refusal(400, f"the session has had its agent.max_calls={self._max_calls} answers")
        parent = self._parent_of(request)
        if request.tools:
            self._form.bridge(request)
            self._form.parser()
        if parent is None:
            shown = context = self._form.prompt(request)
        else:
            shown = self._form.following(request, len(parent.history), is_stopped=parent.is_stopped)
            context = joined(parent.whole, Shown(parent.ids), shown)
            request = request.after(parent.request, parent.history)
        used = self.size([*self.nodes, *self.open], (parent, shown))
        if used >= self._room:
            self.refused_by = "length"
            raise self.no_room()
        digest = digest_of(*filter(None, context))
        number = self._counts[digest]
        self._counts[digest] += 1
        key = digest_of(digest, number, request.max_tokens, request.stop, request.shown)
        seed = self._seed_of(request, context, number)
        node = Node(parent, request, shown.ids, key, seed, shown.images_at)
        self.n_calls += 1
        self.pictures |= {one.digest: one for one in request.pictures}
        self.is_overlapping |= bool(self.open)
        known = self.recorded.get(key)
        if known is not None and used + len(known["ids"]) > self._room:  # the program asks otherwise
            known = None
        if known is not None:
            node.ids, node.log_probs, node.versions = (
                list(known[name]) for name in ("ids", "log_probs", "versions")
            )
            node.is_stopped = known["is_stopped"]
            self.n_sampled += len(node.ids)
        self.open.append(node)
        if known is not None and known["is_complete"]:
            self.n_replayed += 1
            self.answer(node)
        return node

    def _parent_of(self, request: ChatRequest) -> Node | None:
        """Return the node whose messages are the longest beginning; of equals never the one by arrival."""
        fitting = [
            node
            for node in self.nodes
            if len(node.history) < len(request.history)
            and request.history[: len(node.history)] == node.history
            and node.request.shown == request.shown
        ]
        most = max((len(node.history) for node in fitting), default=0)

        def rank(node: Node) -> tuple[bool, bool, list[int]]:
            sent = request.messages[most - 1]
            ids = [call["id"] for call in sent.get("tool_calls", ())]
            assert node.answer is not None
            thoughts = {sent.get(name) for name in ("reasoning_content", "reasoning", "thinking")}
            thoughts |= {split_thinking(sent["content"])[0]} - {""}
            has_ids = bool(ids) and ids == node.call_ids
            return has_ids, node.answer.thinking in thoughts, [-i for i in _order(node)]

        longest = (node for node in fitting if len(node.history) == most)
        return max(longest, key=rank, default=None)

    def no_room(self) -> Refusal:
        """Return the refusal of a request whose context does not fit."""
        return Refusal(
            400,
            f"{TOO_LONG}: the session's contexts and answers have no room left in "
            f"data.max_response_length={self._room} tokens (a first context of at most "
            f"data.max_prompt_length={self._widest} needs none of them)",
            TOO_LONG,
        )

    def _seed_of(self, request: ChatRequest, context: Shown, number: int) -> int | None:
        """Return the seed of an answer: a function of the sample's seed and of the context alone."""
        if self._seed is None:
            return None
        shown = tuple(map(canonical, self._form.how.messages(request.messages)))
        if number == 0 and shown == self._prompt:
            return self._seed
        drawn_from = (self._seed, *context.ids, *digests_of(context.images_at))
        text = ",".join(map(str, drawn_from)) + (f";{number}" if number else "")
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # vLLM's seeds are signed

    def begin(self, nodes: Sequence[Node]) -> list[Node]:
        """Return this session's open ``nodes`` in an order without arrival, before they are sampled."""
        if self.prompt is None:
            self.prompt = self._prompt_of(node.shown for node in nodes if node.parent is None)
        return sorted(nodes, key=_order)

    def _prompt_of(self, roots: Iterable[Shown]) -> Shown | None:
        """Return the context that becomes the row's prompt: the longest that fits, whichever came first."""
        fitting = (
            one
            for one in roots
            if len(one.ids) <= self._widest and len(digests_of(one.images_at)) <= self._most_pictures
        )
        return max(fitting, key=lambda one: (len(one.ids), one), default=None)

    def without_room(self) -> list[Node]:
        """Take out open nodes for which those that were sampled meanwhile have left no room."""
        found: list[Node] = []
        while self.size([*self.nodes, *self.open]) > self._room:
            found.append(max((node for node in self.open if not node.ids), key=_order))
            self.open.remove(found[-1])
            self.refused_by = "length"
        return found

    def limits(self, nodes: Sequence[Node]) -> list[int]:
        """Return the most tokens of each of the open ``nodes``, sampled together; 0 without room."""
        left, found = self._room - self.size([*self.nodes, *self.open]), []
        for number, node in enumerate(nodes):
            most = left // len(nodes) + (number < left % len(nodes)) + len(node.ids)
            found.append(min(most, node.request.max_tokens or most))
        return found

    def answer(self, node: Node) -> None:
        """Make an open node, whose ids are complete, an answered one."""
        count, has_stop = self._form.cut_at_stop(node.ids, node.request.stop)
        node.is_cut = not (node.is_stopped or has_stop)
        if count < len(node.ids):
            self.n_dropped += len(node.ids) - count
            del node.ids[count:], node.log_probs[count:], node.versions[count:]
        # a text of the request or of rollout.stop may have ended it
        node.is_stopped = node.is_stopped and self._form.ends(node.ids)
        node.answer = self._form.read(node.request, node.context, node.ids)
        node.history = (*node.request.history, canonical(node.message()))
        self.open.remove(node)
        self.nodes.append(node)

    def end(self, reason: str, error: str = "") -> None:
        """End the session; nodes without a client that waits or has the answer leave it."""
        self.ended_by, self.error = reason, error
        continued = {id(node.parent) for node in self.nodes}
        kept = [node for node in self.nodes if node.is_claimed or id(node) in continued]
        self.n_abandoned += len(self.nodes) - len(kept) + sum(not node.is_claimed for node in self.open)
        left = {id(node) for node in kept}
        self.n_dropped += sum(len(node.ids) for node in (*self.nodes, *self.open) if id(node) not in left)
        self.nodes, self.open = kept, []
        if self.prompt is not None and not self.pictures.keys() >= {*digests_of(self.prompt.images_at)}:
            self.prompt = None  # of a program that was started again, and sent others

    def unused(self) -> bool:
        """Return True if the program has not requested an answer again that it had got."""
        keys = {node.key for node in self.nodes}
        return any(
            known["is_complete"] and known["is_claimed"] and key not in keys
            for key, known in self.recorded.items()
        )

    @property
    def is_cut(self) -> bool:
        """True if a limit ended the last answer, or one that left no room in the row."""
        cut = [node.is_cut for node in self.ordered if node.is_claimed]
        return bool(cut) and (cut[-1] or (any(cut) and self.size(self.nodes) >= self._room))

    @property
    def ordered(self) -> list[Node]:
        """The nodes as they stand in the row: as they were answered, if no two overlapped."""
        return sorted(self.nodes, key=_order) if self.is_overlapping else self.nodes

    def size(self, nodes: Sequence[Node], further: tuple[Node | None, Shown] | None = None) -> int:
        """Return the number of tokens of a row with these nodes, and ``further`` inserted ones."""
        added = [(node.parent, node.shown) for node in nodes] + ([] if further is None else [further])
        given = {(id(parent) if parent else 0, _hashable(shown)): shown for parent, shown in added}
        prompt = self.prompt
        if prompt is None:
            prompt = self._prompt_of(shown for (parent, _), shown in given.items() if not parent)
        inserted = sum(len(shown.ids) for (parent, _), shown in given.items() if parent or shown != prompt)
        return inserted + sum(len(node.ids) for node in nodes)

    def row(self) -> Row:
        """Return the session as one row of tokens; nodes with equal contexts share them."""
        return row_of([call for call, _ in self._calls()])

    def images_at(self) -> list[int]:
        """Return the column of this name of the row's tokens."""
        return row_of(
            [
                token_tree.Call(call.continues, at or [0] * len(call.inserted), [0] * len(call.sampled))
                for call, at in self._calls()
            ]
        ).ids

    def _calls(self) -> list[tuple[token_tree.Call, tuple[int, ...]]]:
        """Return the calls of the row, with the column ``images_at`` of their inserted tokens."""
        calls: list[tuple[token_tree.Call, tuple[int, ...]]] = []
        numbers: dict[int, int] = {}
        contexts: dict[tuple[int, Any], int] = {}
        for node in self.ordered:
            before = NOTHING if node.parent is None else numbers[id(node.parent)]
            if node.parent is None and node.shown == self.prompt:
                before = PROMPT
            elif (place := (before, _hashable(node.shown))) in contexts:
                before = contexts[place]
            else:
                calls.append((token_tree.Call(before, node.inserted, []), node.images_at))
                before = contexts[place] = len(calls) - 1
            numbers[id(node)] = len(calls)
            calls.append((token_tree.Call(before, [], node.ids), ()))
        return calls

    def state(self) -> dict[str, Any]:
        """Return the recorded answers for a program that is started again, as plain values."""
        answers = dict(self.recorded)
        for node in (*self.nodes, *self.open):
            if node.ids:
                answers[node.key] = {
                    "ids": list(node.ids),
                    "log_probs": list(node.log_probs),
                    "versions": list(node.versions),
                    "is_stopped": node.is_stopped,
                    "is_complete": node.answer is not None,
                    "is_claimed": node.is_claimed,
                }
        return {"prompt": None if self.prompt is None else tuple(self.prompt), "answers": answers}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``."""
        self.prompt = None if state["prompt"] is None else Shown(*state["prompt"])
        self.recorded, self.is_resumed = dict(state["answers"]), True


def _hashable(shown: Shown) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shown.ids), shown.images_at


def _order(node: Node) -> list[int]:
    return [len(node.path), *node.context, -1, *node.ids, *node.key.encode()]

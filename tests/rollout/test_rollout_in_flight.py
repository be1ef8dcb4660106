"""Several batches in flight against plain forward passes, one token of one sample at a time."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass, field

import pytest
import torch

from strop.algorithms.token_tree import PROMPT, Call, row_of
from strop.errors import CheckpointError, TrainingError
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams, answer
from strop.rollout.hf.engine import HFRollout
from strop.rollout.in_flight import InFlight
from strop.rollout.vllm.arguments import row_of_samples

from tiny_lms import EOS, PAD, VOCABULARY, prompts_of, response_ids, tiny_lm

LENGTHS = [3, 9, 1]
ENDS = (EOS, 30, 31)
STOPS = (0, *range(7, 20))  # 0 is also what unused places hold
T = 16
BATCHES = 6


def batch_of(number: int, n: int) -> DataProto:
    """Prompts and seeds that no other batch has."""
    prompts = prompts_of(LENGTHS, n=n, pad=EOS)
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    prompts.batch["input_ids"] = torch.where(mask.bool(), (ids + 5 * number) % (VOCABULARY - 2) + 2, EOS)
    prompts.batch["seeds"] = prompts.batch["seeds"] + 100 * number
    prompts.non_tensor_batch["uid"] = prompts.non_tensor_batch["uid"] + f" of {number}"
    return prompts


@functools.cache
def weights_of(version: int, family: str = "qwen2") -> dict[str, torch.Tensor]:
    """Weights near those of version 0, so that a sample stays likely over several versions."""
    first = tiny_lm(family).state_dict()
    if version == 0:
        return first
    other = tiny_lm(family, seed=version).state_dict()
    return {name: 0.8 * weight + 0.2 * other[name] for name, weight in first.items()}


@dataclass
class Sample:
    prompt: list[int]
    uniforms: list[float]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) == T

    def step(self, model, params: SamplingParams, stops: set[int], version: int) -> None:
        """One token by a forward pass over everything before it."""
        with torch.no_grad():
            logits = model(torch.tensor([self.prompt + self.tokens]), use_cache=False).logits[0, -1].double()
        log_probs = (logits if params.greedy else logits / params.temperature).log_softmax(-1)
        if params.greedy:
            token = int(log_probs.argmax())
        else:
            probs, order = log_probs.exp().sort(descending=True)
            if params.top_p < 1:
                kept = int((probs.cumsum(0) < params.top_p).sum()) + 1
                probs, order = probs[:kept] / probs[:kept].sum(), order[:kept]
                log_probs = torch.full_like(log_probs, -torch.inf).scatter(0, order, probs.log())
            else:
                probs, order = log_probs.exp(), torch.arange(VOCABULARY)
            at = torch.searchsorted(probs.cumsum(0), self.uniforms[len(self.tokens)], right=True)
            token = int(order[min(int(at), len(order) - 1)])
        self.tokens.append(token)
        self.log_probs.append(float(log_probs[token]))
        self.versions.append(version)
        self.stopped = token in stops


class Reference:
    """The protocol's schedule in lists."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.stops = {*params.stop_token_ids, *(() if params.ignore_eos else ENDS)}
        self.queue: list[list[Sample]] = []

    def admit(self, prompts: DataProto) -> None:
        samples = []
        for ids, mask, seeds in zip(
            *(prompts.batch[name] for name in ("input_ids", "attention_mask", "seeds")), strict=True
        ):
            for seed in seeds.tolist():
                generator = torch.Generator().manual_seed(seed)
                uniforms = torch.rand(T, dtype=torch.float64, generator=generator).tolist()
                samples.append(Sample(ids[mask.bool()].tolist(), uniforms))
        self.queue.append(samples)

    def finish(self, model, version: int) -> list[Sample]:
        """All samples together, however many the engine generates at once."""
        while not all(sample.done for sample in self.queue[0]):
            for sample in (sample for batch in self.queue for sample in batch if not sample.done):
                sample.step(model, self.params, self.stops, version)
        return self.queue.pop(0)


def params_of(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": T, "n": 2, "stop_token_ids": STOPS, "temperature": 1.5, **changes})


def rollout_of(model, **options) -> HFRollout:
    return HFRollout(model, pad_token_id=PAD, eos_token_ids=ENDS, **options)


def ticks(rollout, params, *, ahead: int, after=None, first: int = 1, family: str = "qwen2"):
    """Finish batches ``first`` to ``BATCHES``, each with other weights; then ``after(number)``."""
    results = {}
    for number in range(first, BATCHES + 1):
        rollout.model.load_state_dict(weights_of(number - 1, family))
        for admitted in range(1 if number == 1 else number + ahead, min(number + ahead, BATCHES) + 1):
            rollout.admit(admitted, batch_of(admitted, params.n), params)
        results[number] = rollout.finish(number, number - 1)
        if after is not None:
            after(number)
    return results


def require_equal(found: dict[int, DataProto], expected: dict[int, DataProto]) -> None:
    """Bit for bit."""
    for number, batch in found.items():
        columns = expected[number].batch
        assert batch.batch.keys() == columns.keys()
        assert all(torch.equal(column, columns[name]) for name, column in batch.batch.items())


CASES = {
    "plain": {},
    "three ahead": {"ahead": 3},
    "one sample": {"n": 1},
    "greedy": {"do_sample": False},
    "ignore_eos": {"ignore_eos": True},
    "top_p": {"top_p": 0.8},
    "micro-batches": {"size": 4},
    "one at a time": {"size": 1, "ahead": 3},
    "to the limit": {"size": 4, "stop_token_ids": (0,)},  # cut in the turn of an earlier batch
    "windows": {"family": "gemma3", "n": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_the_one_that_plain_passes_with_its_versions_weights_sample(case):
    options = dict(CASES[case])
    ahead, size = options.pop("ahead", 2), options.pop("size", None)
    family = options.pop("family", "qwen2")
    params, model = params_of(**options), tiny_lm(family)
    rollout = rollout_of(model, micro_batch_size=size)
    found = ticks(rollout, params, ahead=ahead, family=family)
    reference, seen = Reference(params), set()
    for number in range(1, BATCHES + 1):
        model.load_state_dict(weights_of(number - 1, family))
        for admitted in range(1 if number == 1 else number + ahead, min(number + ahead, BATCHES) + 1):
            reference.admit(batch_of(admitted, params.n))
        before = [(len(sample.tokens), sample.done) for sample in reference.queue[0]]
        expected = reference.finish(model, number - 1)
        columns = found[number].batch
        assert response_ids(columns) == [sample.tokens for sample in expected]
        assert columns["truncated"].tolist() == [not sample.stopped for sample in expected]
        for row, (sample, (length, done)) in enumerate(zip(expected, before, strict=True)):
            end = len(sample.tokens)
            versions, log_probs = columns["rollout_versions"][row], columns["rollout_log_probs"][row]
            assert versions.tolist() == sample.versions + [-1] * (T - end)
            assert log_probs[:end].tolist() == pytest.approx(sample.log_probs, abs=1e-4)
            seen.add("ahead" if done else "stopped" if length and sample.stopped else "cut" if length else "")
            seen.add(len(set(sample.versions)))
    assert columns["rollout_versions"].dtype == torch.int32
    assert rollout.in_flight() == {"batches": {}}
    # Samples complete before their turn, continued to a stop token, and over several versions occurred.
    assert {"plain": {"ahead", "stopped", 1, 2, 3}, "to the limit": {"ahead", 1}}.get(
        case, {"ahead", "stopped", 2}
    ) <= seen


@pytest.mark.parametrize("size", [None, 5])
def test_samples_continued_with_equal_weights_are_those_of_one_call(size):
    params, rollout = params_of(top_k=20), rollout_of(tiny_lm(), micro_batch_size=size)
    batches = {number: batch_of(number, params.n) for number in (1, 2, 3)}
    for number, prompts in batches.items():
        rollout.admit(number, prompts, params)
    continued = 0
    for number, prompts in batches.items():
        lengths = rollout.in_flight()["batches"][number]["lengths"]
        found = rollout.finish(number, 5)
        expected = rollout.generate(prompts, params)
        versions = found.batch.pop("rollout_versions")
        assert torch.equal(versions, torch.where(expected.batch["response_mask"] > 0, 5, -1))
        assert torch.equal(found.batch["responses"], expected.batch["responses"])
        torch.testing.assert_close(found.batch, expected.batch, atol=1e-5, rtol=1e-5)
        assert list(found.non_tensor_batch["uid"]) == list(expected.non_tensor_batch["uid"])
        continued += int(((lengths > 0) & (lengths < expected.batch["response_mask"].sum(1))).sum())
    assert continued > 0


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_generate_is_finish_of_one_batch(family):
    params, rollout = params_of(n=3), rollout_of(tiny_lm(family), micro_batch_size=7)
    rollout.admit(9, batch_of(1, 3), params)
    found = rollout.finish(9, 4).batch
    found.pop("rollout_versions")
    require_equal({1: DataProto(found)}, {1: rollout.generate(batch_of(1, 3), params)})


@pytest.mark.fast("bf16")
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 4}, {"compute_dtype": torch.bfloat16}], ids=["", "micro", "bf16"]
)
def test_a_new_engine_goes_on_bit_for_bit_from_what_was_in_flight(options):
    """Through ``torch.save``; calls of ``generate`` in between have no influence."""
    params, states = params_of(), {}
    first = rollout_of(tiny_lm(), **options)

    def save(number: int) -> None:
        torch.save(first.in_flight(), states.setdefault(number, io.BytesIO()))

    def generate(rollout: HFRollout, number: int) -> None:
        rollout.generate(batch_of(number, 1), params_of(n=1, temperature=0.7))

    expected = ticks(first, params, ahead=2, after=save)
    for number in (1, 3):
        other = rollout_of(tiny_lm(), **options)
        for admitted in range(number + 1, min(number + 2, BATCHES) + 1):
            other.admit(admitted, batch_of(admitted, params.n), params)
        states[number].seek(0)
        other.restore(torch.load(states[number], weights_only=True))
        found = ticks(
            other,
            params,
            ahead=2,
            first=number + 1,
            after=functools.partial(generate, other),
        )
        require_equal(found, expected)
    mixed = [
        set(row.tolist()) - {-1} for batch in expected.values() for row in batch.batch["rollout_versions"]
    ]
    assert any(len(versions) > 1 for versions in mixed)


def test_batches_sampled_in_other_ways_wait_for_their_turn():
    rollout, hot = rollout_of(tiny_lm()), params_of(temperature=2.5)
    rollout.admit(1, batch_of(1, 2), params_of())
    rollout.admit(2, batch_of(2, 2), hot)
    rollout.finish(1, 0)
    assert not rollout.in_flight()["batches"][2]["lengths"].any()
    found = rollout.finish(2, 0).batch
    found.pop("rollout_versions")
    require_equal({2: DataProto(found)}, {2: rollout.generate(batch_of(2, 2), hot)})


def test_whole_responses_of_the_batch_are_reported_also_those_complete_before():
    params, rollout, early = params_of(n=2), rollout_of(tiny_lm()), 0
    for number in (1, 2, 3):
        rollout.admit(number, batch_of(number, 2), params)
    continued = 0
    for number in (1, 2, 3):
        state, reported = rollout.in_flight()["batches"][number], {}

        def finished(prompt, sample, token_ids, reported=reported):
            assert (prompt, sample) not in reported
            reported[prompt, sample] = token_ids

        ids = response_ids(rollout.finish(number, 0, finished).batch)
        assert all(token_ids == ids[prompt * 2 + sample] for (prompt, sample), token_ids in reported.items())
        done = state["stopped"] | (state["lengths"] == T)
        assert {divmod(row, 2) for row in done.nonzero()[:, 0].tolist()} <= reported.keys()
        early += int(done.sum())
        continued += sum(bool(state["lengths"][2 * p + s]) and not done[2 * p + s] for p, s in reported)
    assert early > 0
    assert continued > 0


def test_batches_out_of_order_are_errors():
    rollout = rollout_of(tiny_lm())
    rollout.admit(4, batch_of(4, 2), params_of())
    for number in (3, 4):
        with pytest.raises(TrainingError, match=f"batch {number} .*batch 4"):
            rollout.admit(number, batch_of(number, 2), params_of())
    rollout.admit(5, batch_of(5, 2), params_of())
    for number in (3, 5):
        with pytest.raises(TrainingError, match=rf"batch {number} .*\[4, 5\]"):
            rollout.finish(number, 0)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (5, {}, r"\[2\].*\[5\]"),
        (2, {"n": 3}, "6 of up to .* expected 9"),
        (2, {"max_tokens": 2}, "at most 2"),
    ],
)
def test_what_was_in_flight_must_fit_what_is_admitted(number, changes, message):
    saving, loading = rollout_of(tiny_lm()), rollout_of(tiny_lm())
    for admitted in (1, 2):
        saving.admit(admitted, batch_of(admitted, 2), params_of())
    saving.finish(1, 0)
    params = params_of(**changes)
    loading.admit(number, batch_of(number, params.n), params)
    with pytest.raises(CheckpointError, match=message):
        loading.restore(saving.in_flight())


def in_flight_of_ranks(rank: int | None, params: SamplingParams) -> InFlight:
    """Batch 1 of two ranks, of 2 prompts and of 1, on one of them; None: of the second one alone."""
    whole = batch_of(1, params.n)
    parts = [whole[:2], whole[2:]]
    return InFlight(parts[1], params) if rank is None else InFlight(parts[rank], params, parts, rank)


def test_ranks_that_generate_together_save_their_own_samples_and_restore_all():
    params = params_of(n=2)
    saving = [in_flight_of_ranks(rank, params) for rank in (0, 1)]
    new = Samples(
        torch.arange(12).view(6, 2) + 40, torch.full((6, 2), -0.5), torch.full((6,), 2), torch.ones(6).bool()
    )
    for batch in saving:  # in lockstep, all samples on each
        batch.add(torch.arange(6), new, 3)
    states = [batch.state() for batch in saving]
    assert [state["tokens"].tolist() for state in states] == [
        [[40, 41], [42, 43], [44, 45], [46, 47]],
        [[48, 49], [50, 51]],
    ]
    alone = in_flight_of_ranks(None, params)  # each rank with an engine
    alone.restore(states[1])
    assert [alone.ids(row) for row in range(2)] == [[48, 49], [50, 51]]
    states[1] = alone.state()
    for rank, batch in enumerate(in_flight_of_ranks(rank, params) for rank in (0, 1)):
        batch.restore(states[rank])
        batch.restore_others(lambda own: states)
        assert [batch.ids(row) for row in range(6)] == new.tokens.tolist()
        assert batch.versions[:, :3].tolist() == [[3, 3, -1]] * 6
    whole = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    old = in_flight_of_ranks(1, params)
    old.restore(whole)  # as version 0.1.0 saved it
    assert [old.ids(row) for row in range(6)] == new.tokens.tolist()


def test_the_rows_of_sessions_have_what_each_token_follows_and_count_their_stop_tokens():
    row = row_of([Call(PROMPT, [], [9, EOS]), Call(PROMPT, [], [8, EOS]), Call(0, [7], [EOS, 6])])
    ids = [*row.ids, 5]  # undefined from the length on
    samples = Samples(
        torch.tensor([ids]),
        torch.zeros(1, 8),
        torch.tensor([7]),
        torch.tensor([True]),
        torch.tensor([[*row.sampled, True]]),
        torch.tensor([[*row.follows, -2]]),
    )
    params = SamplingParams(max_tokens=8)
    found = answer(prompts_of([2]), params, samples, pad_token_id=PAD, hidden_token_ids=[EOS]).batch
    assert found["follows"].dtype == torch.int32
    assert found["follows"].tolist() == [[-1, 0, -1, 2, 1, 4, 5, 6]]
    assert found["response_mask"].tolist() == [[1, 1, 1, 1, 0, 1, 1, 0]]
    assert found["hidden_tokens"].tolist() == [1]  # stop tokens at the ends of calls are not hidden


def test_a_response_that_repeats_itself_has_ended_and_is_truncated():
    """By vLLM's reasons for the end of a request; None: it was aborted."""
    flight = InFlight(prompts_of([2, 3, 1, 2]), SamplingParams(max_tokens=6, do_sample=False))
    for row, reason in enumerate(("repetition", None, "length", "stop")):
        flight.add(torch.tensor([row]), row_of_samples([9, 9, 9], [-1.0, -2.0, -3.0], reason), 4)
    assert flight.complete.tolist() == [True, False, False, True]
    assert flight.decoding.tolist() == [False, True, True, False]  # of its 6 tokens, it has 3
    found = flight.result(pad_token_id=PAD, hidden_token_ids=[9]).batch
    assert found["truncated"].tolist() == [True, True, True, False]
    assert found["rollout_log_probs"][0].tolist() == [-1, -2, -3, 0, 0, 0]
    assert found["hidden_tokens"].tolist() == [3, 3, 3, 2]  # the last token is no stop token

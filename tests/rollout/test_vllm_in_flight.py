"""Batches that the vLLM rollout generates over several calls, between which its weights change."""

from __future__ import annotations

import functools
import io
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from strop.errors import CheckpointError, TrainingError
from strop.rollout.base import SamplingParams
from strop.rollout.in_flight import Queue, continued_seed
from strop.rollout.vllm.keys import Sampling, SamplingConfig

from messages import Message, naming
from outside import require_vllm
from ranks import Ranks
from tiny_lms import prompts_of, response_ids, response_log_probs
from tiny_vllm import model_of, rollout_of

require_vllm()
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_vllm_outlives_its_module")]

AHEAD = 2
"""Batches in flight beside the one that is completed."""
LENGTHS = ([3, 18, 1], [17, 5, 16], [18, 14, 17], [2, 17, 15])
PARAMS = SamplingParams(max_tokens=30, n=4, stop_token_ids=(7, 8))
SEATS = 16
"""Sequences in a step of the engine; three batches are 36."""


@pytest.fixture(scope="module")
def policies():
    """The policy of each batch; the actor is not trained between batches 1 and 2."""
    models = [model_of("qwen2", tied=True, seed=seed, initializer_range=0.2) for seed in range(3)]
    return [models[0], models[1], models[1], models[2]]


@pytest.fixture(scope="module")
def rollout(policies, tmp_path_factory):
    return rollout_of(policies[0], tmp_path_factory.mktemp("engine"))


def batch_of(number, rows=slice(None)):
    prompts = prompts_of(LENGTHS[number], n=PARAMS.n)
    prompts.batch["seeds"] += 100 * number
    return prompts[rows]


def admit(rollout, numbers, rows=slice(None)):
    for number in numbers:
        rollout.admit(number, batch_of(number, rows), PARAMS)


def run(rollout, policies, *, start=0, boundary=None, update=True, finished=None, rows=slice(None)):
    """Return the batches from ``start`` on; ``boundary(number)`` runs where a checkpoint is cut."""
    answers = []
    if start == 0:
        admit(rollout, range(AHEAD), rows)
    for number in range(start, len(policies)):
        if boundary is not None:
            boundary(number)
        if update or number == 0 or policies[number] is not policies[number - 1]:
            rollout.update_weights(policies[number].named_parameters())
        admit(rollout, range(number + AHEAD, min(number + AHEAD + 1, len(policies))), rows)
        report = finished and functools.partial(finished, number)
        answers.append(rollout.finish(number, number, report).batch)
    assert rollout.in_flight() == {"batches": {}}
    return answers


def equal(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed(rollout, policies):
    return run(rollout, policies)


@pytest.mark.fast("sampled", "past eos")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, n=5, stop_token_ids=(7, 8)),
        SamplingParams(max_tokens=14, n=2, temperature=0.8, top_k=9, top_p=0.8, stop_token_ids=(9,)),
        SamplingParams(max_tokens=16, n=4, ignore_eos=True),
        SamplingParams(max_tokens=16, do_sample=False),
    ],
    ids=["sampled", "filtered", "past eos", "greedy"],
)
def test_generate_returns_what_vllms_own_loop_returns(rollout, policies, params):
    from vllm.sampling_params import RequestOutputKind

    rollout.update_weights(policies[0].named_parameters())
    prompts = prompts_of([3, 9, 1, 6, 5], n=params.n)
    found = rollout.generate(prompts, params).batch
    batch, rows = rollout._begun(prompts, params), range(len(prompts) * params.n)
    assert rollout._llm.reset_prefix_cache()
    outputs = rollout._llm.generate(
        [{"prompt_token_ids": batch.prompt_ids[row // params.n].tolist()} for row in rows],
        [rollout._sampling(batch, row, RequestOutputKind.FINAL_ONLY) for row in rows],
        use_tqdm=False,
    )
    assert response_ids(found) == [list(request.outputs[0].token_ids) for request in outputs]
    expected = [torch.tensor(request.outputs[0].logprobs.logprobs) for request in outputs]
    assert torch.equal(found["rollout_log_probs"][found["response_mask"].bool()], torch.cat(expected))
    assert found["truncated"].tolist() == [r.outputs[0].finish_reason == "length" for r in outputs]


def test_every_tokens_log_prob_is_that_of_the_version_that_sampled_it(undisturbed, policies):
    require_log_probs_of_their_versions(undisturbed, policies)


def require_log_probs_of_their_versions(answers, policies):
    spans = Counter()
    for batch in answers:
        versions, mask = batch["rollout_versions"], batch["response_mask"].bool()
        assert versions.dtype == torch.int32
        assert torch.equal(versions >= 0, mask)
        by_version = torch.stack([response_log_probs(policy, batch) for policy in policies])
        expected = by_version.gather(0, versions.clamp(min=0).long()[None])[0]
        assert (batch["rollout_log_probs"] - expected)[mask].abs().max() < 1e-4
        others = by_version.gather(0, (versions.clamp(min=0).long() + 3)[None] % 4)[0]
        assert (batch["rollout_log_probs"] - others)[mask].abs().mean() > 0.1
        for row, length in zip(versions, mask.sum(1), strict=True):
            assert row[:length].tolist() == sorted(row[:length].tolist())
            spans[tuple(row[:length].unique().tolist())] += 1
    assert spans[0, 1] > 0
    assert spans[1, 2] > 0
    assert spans[0, 1, 2] > 0


def test_every_request_of_a_sample_draws_with_a_seed_of_its_own():
    seeds = [continued_seed(seed, done) for seed in (0, 1, 2**63 - 1) for done in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[::50] == [0, 1, 2**63 - 1]


def test_rows_of_later_batches_advance_by_a_token_in_every_step(rollout, policies):
    rollout.update_weights(policies[0].named_parameters())
    prompts = prompts_of([3, 5])
    for number, tokens in enumerate([6, 14, 30]):
        rollout.admit(number, prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    first, second, third = (rollout.finish(number, number).batch["rollout_versions"] for number in range(3))
    assert first.tolist() == [[0] * 6] * 2
    assert second.tolist() == [[0] * 6 + [1] * 8] * 2
    assert third.tolist() == [[0] * 6 + [1] * 8 + [2] * 16] * 2


@pytest.mark.slow
def test_nothing_between_two_calls_changes_what_they_return(rollout, policies, undisturbed):
    """Validation, an update without a change, or a resume with the samples in flight."""
    validation = SamplingParams(max_tokens=9, n=3)

    def validate(number):
        rollout.generate(prompts_of([4, 6, 3], n=3), validation)

    def resume(number):
        file = io.BytesIO()
        torch.save(rollout.in_flight(), file)
        rollout._queue = Queue()
        validate(number)  # what the engine did before is no part of the state
        admit(rollout, range(number, min(number + AHEAD, len(policies))))
        file.seek(0)
        rollout.restore(torch.load(file, weights_only=True))

    assert equal(run(rollout, policies, boundary=validate), undisturbed)
    assert equal(run(rollout, policies, boundary=resume), undisturbed)
    assert equal(run(rollout, policies, update=False), undisturbed)


@pytest.mark.slow
def test_one_seed_a_call_repeats_equal_calls_and_no_others(rollout, policies, undisturbed, monkeypatch):
    """The seed is of the call's samples and their tokens, so a resume and other calls change nothing."""
    monkeypatch.setattr(rollout, "_seed_per_sample", False)
    first = run(rollout, policies)
    require_log_probs_of_their_versions(first, policies)
    assert not equal(first, undisturbed)

    def disturb(number):
        torch.rand(3)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist()
        rollout.generate(prompts_of([4, 6, 3], n=3), SamplingParams(max_tokens=9, n=3))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        file = io.BytesIO()
        torch.save(rollout.in_flight(), file)
        rollout._queue = Queue()
        admit(rollout, range(number, min(number + AHEAD, len(policies))))
        file.seek(0)
        rollout.restore(torch.load(file, weights_only=True))

    assert equal(run(rollout, policies, boundary=disturb), first)
    rollout.update_weights(policies[0].named_parameters())
    params, prompts = SamplingParams(max_tokens=20, n=2, top_k=20), prompts_of([3, 9, 1], n=2)
    whole = rollout.generate(prompts, params).batch["responses"]
    assert len(whole.unique(dim=0)) == 6  # samples of a prompt differ
    assert torch.equal(rollout.generate(prompts, params).batch["responses"], whole)
    alone = torch.cat([rollout.generate(prompts[[row]], params).batch["responses"] for row in range(3)])
    assert not torch.equal(alone, whole)
    prompts.batch["seeds"] += 50
    assert not torch.equal(rollout.generate(prompts, params).batch["responses"], whole)


def resumed(policies, folder, number):
    rollout = rollout_of(policies[0], folder)
    admit(rollout, range(number, min(number + AHEAD, len(policies))))
    rollout.restore(torch.load(folder / str(number), weights_only=True))
    return run(rollout, policies, start=number)


@pytest.mark.slow
def test_another_process_continues_the_samples_in_flight(rollout, policies, undisturbed, tmp_path):
    run(rollout, policies, boundary=lambda number: torch.save(rollout.in_flight(), tmp_path / str(number)))
    for number in range(1, len(policies)):
        with Ranks(1) as process:
            (answers,) = process.run(1, resumed, policies, tmp_path, number)
        assert equal(answers, undisturbed[number:])


def test_every_sample_is_reported_once_with_its_batch(rollout, policies, monkeypatch):
    plain, steps, reported, at_start = rollout._llm.llm_engine.step, [], [], {}

    def step():
        steps.append(None)
        return plain()

    def report(number, prompt, index, tokens):
        reported.append((number, prompt * PARAMS.n + index, tokens))
        early[number] += len(steps) == at_start[number]

    early = Counter()
    monkeypatch.setattr(rollout._llm.llm_engine, "step", step)
    answers = run(
        rollout, policies, boundary=lambda number: at_start.update({number: len(steps)}), finished=report
    )
    assert sorted(reported) == [
        (number, row, ids)
        for number, batch in enumerate(answers)
        for row, ids in enumerate(response_ids(batch))
    ]
    assert [number for number, *_ in reported] == sorted(number for number, *_ in reported)
    assert early[0] == 0
    assert early.total() > 0  # complete before their batch's call


def test_a_call_that_fails_can_be_repeated(rollout, policies, undisturbed, monkeypatch):
    rollout.update_weights(policies[0].named_parameters())
    admit(rollout, range(AHEAD + 1))
    plain, steps = rollout._llm.llm_engine.step, itertools.count(1)

    def step():
        if next(steps) > 5:
            raise KeyboardInterrupt
        return plain()

    monkeypatch.setattr(rollout._llm.llm_engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        rollout.finish(0, 0)
    monkeypatch.undo()
    assert equal([rollout.finish(0, 0).batch], undisturbed[:1])
    rollout._queue = Queue()


def test_calls_out_of_order_and_foreign_states_are_refused(rollout, policies):
    rollout.update_weights(policies[0].named_parameters())
    admit(rollout, [1, 2])
    with pytest.raises(TrainingError, match=naming("batch 2", "[1, 2]")):
        admit(rollout, [2])
    with pytest.raises(TrainingError, match=naming("batch 2", "[1, 2]")):
        rollout.finish(2, 0)
    state = rollout.in_flight()
    rollout._queue = Queue()
    with pytest.raises(CheckpointError, match=naming("[1, 2]", "[]")):
        rollout.restore(state)
    admit(rollout, [1, 2], rows=slice(2))
    with pytest.raises(CheckpointError, match=naming("12", "8", "processes")):
        rollout.restore(state)
    rollout._queue = Queue()


@pytest.mark.fast("min_p")
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {5: 2.0, 9: 2.0}},
        {"allowed_token_ids": list(range(10, 30))},
        {"min_p": 0.2},
        {"min_tokens": 11, "logit_bias": {7: 5.0}},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.9},
        {
            "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 8},
            "allowed_token_ids": [5],
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_continue_exactly_if_the_schema_says_so(rollout, policies, options, monkeypatch):
    """Greedy, so that the uncut response is the oracle."""
    from strop.rollout.vllm.engine import sampling_options

    rollout.update_weights(policies[0].named_parameters())
    monkeypatch.setattr(rollout, "_options", sampling_options(options))
    prompts = prompts_of([3, 9, 1, 6, 5])
    params = SamplingParams(max_tokens=24, do_sample=False, stop_token_ids=(7, 8))
    uncut = rollout.generate(prompts, params).batch
    lengths = (uncut["response_mask"].sum(1).long() - 1).clamp(max=5)
    kept = torch.arange(24) < lengths[:, None]
    rollout.admit(0, prompts, params)
    state = {
        "tokens": uncut["responses"],
        "log_probs": uncut["rollout_log_probs"],
        "versions": torch.where(kept, 0, -1).int(),
        "lengths": lengths,
        "stopped": torch.zeros(len(prompts), dtype=torch.bool),
    }
    rollout.restore({"batches": {0: state}})
    cut = rollout.finish(0, 1).batch
    assert (cut["rollout_versions"] == 0).sum() == lengths.sum() >= 15
    field = SamplingConfig.model_fields[next(iter(options))]
    (marker,) = (item for item in field.metadata if isinstance(item, Sampling))
    assert torch.equal(cut["responses"], uncut["responses"]) is marker.continues


def on_a_rank(policies, folder, seed_per_sample):
    """Run the shares of one of two ranks that have one engine."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rollout = rollout_of(policies[0], folder, rank=rank, world_size=2, seed_per_sample=seed_per_sample)
    rows, states = [slice(0, 2), slice(2, 3)][rank], {}
    reported = []
    answers = run(
        rollout,
        policies,
        boundary=lambda number: states.setdefault(number, rollout.in_flight()),
        finished=lambda number, *sample: reported.append((number, *sample)),
        rows=rows,
    )
    admit(rollout, range(2, 2 + AHEAD), rows)
    rollout.restore(states[2])
    return answers, equal(run(rollout, policies, start=2, rows=rows), answers[2:]), len(reported)


@pytest.mark.slow
@pytest.mark.parametrize("seed_per_sample", [True, False])
def test_ranks_of_one_engine_stay_in_lockstep(rollout, policies, tmp_path, monkeypatch, seed_per_sample):
    monkeypatch.setattr(rollout, "_seed_per_sample", seed_per_sample)
    of_one_rank = run(rollout, policies)
    with Ranks(2) as ranks:
        (first, again, count), (second, again_too, other_count) = ranks.run(
            2, on_a_rank, policies, tmp_path, seed_per_sample
        )
    assert again
    assert again_too
    assert count + other_count == sum(len(batch["responses"]) for batch in of_one_rank)
    for number, expected in enumerate(of_one_rank):
        for name in ("responses", "rollout_versions"):
            found = torch.cat([first[number][name], second[number][name]])
            assert torch.equal(found, expected[name]), (number, name)
        found = torch.cat([first[number]["rollout_log_probs"], second[number]["rollout_log_probs"]])
        assert (found - expected["rollout_log_probs"]).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "told"), [(None, False), (True, False), (False, True)])
def test_an_engine_says_once_that_its_samples_depend_on_batching(policies, tmp_path, caplog, setting, told):
    """The last test of this module: vLLM's groups go with any engine, also those of ``rollout``."""
    rollout = rollout_of(policies[0], tmp_path, seed_per_sample=setting)
    rollout.generate(prompts_of([3], n=2), SamplingParams(max_tokens=4, n=2))
    assert rollout._seed_per_sample is not told  # on a CPU
    lines = [record.getMessage() for record in caplog.records if "seed_per_sample" in record.getMessage()]
    assert lines == [Message("seed_per_sample=False", "other samples", "strop docs generation")] * told


@pytest.mark.slow
def test_asynchronous_scheduling_keeps_each_token_with_its_version(policies, tmp_path, monkeypatch):
    """On a GPU vLLM schedules a step before it has the last one's tokens; on a CPU it does not by itself."""
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config.__func__

    def asynchronous(cls, config):
        configure(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(asynchronous))
    ahead = rollout_of(policies[0], tmp_path)
    assert type(ahead._llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "AsyncScheduler"
    answers = run(ahead, policies)
    require_log_probs_of_their_versions(answers, policies)
    assert equal(run(ahead, policies), answers)

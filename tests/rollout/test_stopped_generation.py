"""Generations that are left because the run ends: at the next step, and on several ranks at the same one."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from strop.rollout.base import GenerationStopped, SamplingParams
from strop.rollout.hf.engine import HFRollout

from fake_vllm import FakeVLLM
from http_rollouts import rollout_on
from outside import require_vllm
from ranks import Ranks
from tiny_lms import EOS, PAD, prompts_of, tiny_lm

PARAMS = SamplingParams(max_tokens=40, n=2, ignore_eos=True)
LENGTHS = [3, 1, 6]


def stopped_after(rollout, steps, prompts=None):
    """Stop at the report of step number ``steps``; return how many steps there were in all."""
    reports = []

    def advanced(done, tokens):
        reports.append(tokens)
        if sum(tokens > 0 for tokens in reports) == steps:
            rollout.stopping.set()

    rollout.advanced = advanced
    with pytest.raises(GenerationStopped):
        rollout.generate(prompts_of(LENGTHS, n=2) if prompts is None else prompts, PARAMS)
    return sum(tokens > 0 for tokens in reports)


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_transformers_are_left_before_the_next_pass(micro_batch_size):
    model, passes = tiny_lm(), []
    rollout = HFRollout(model, pad_token_id=PAD, eos_token_ids=[EOS], micro_batch_size=micro_batch_size)

    def count(*_):
        passes.append(None)
        if len(passes) == 5:
            rollout.stopping.set()

    model.register_forward_pre_hook(count)
    model.train()
    with pytest.raises(GenerationStopped):
        rollout.generate(prompts_of(LENGTHS, n=2), PARAMS)
    assert len(passes) == 5
    assert model.training
    with pytest.raises(GenerationStopped):
        rollout.generate(prompts_of(LENGTHS, n=2), PARAMS)
    assert len(passes) == 5


def test_servers_that_take_long_are_left():
    server = FakeVLLM()
    server.delay = 600.0
    rollout = rollout_on(server)

    def stop():
        while not server.bodies():
            time.sleep(0.01)
        rollout.stopping.set()

    thread = threading.Thread(target=stop)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(GenerationStopped):
        rollout.generate(prompts_of(LENGTHS, n=2), PARAMS)
    assert time.monotonic() - begun < 300
    thread.join()


def on_a_rank(model, folder):
    from tiny_vllm import rollout_of

    rank = dist.get_rank()
    rollout = rollout_of(model, folder, rank=rank, world_size=2)
    begun = prompts_of(LENGTHS, n=2)[[slice(0, 1), slice(1, 3)][rank]]
    steps = stopped_after(rollout, [20, 3][rank], begun)
    numbers = torch.tensor([steps, 1])
    dist.all_reduce(numbers)  # as the save that follows, for which both must have left
    return steps, numbers.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_vllm_outlives_its_module")
def test_vllm_is_left_with_nothing_running_and_by_the_ranks_of_an_engine_together(tmp_path):
    require_vllm()
    from tiny_vllm import model_of, rollout_of

    model = model_of("qwen2", tied=True)
    rollout = rollout_of(model, tmp_path / "one")
    assert stopped_after(rollout, 3) == 3
    assert not rollout._llm.llm_engine.has_unfinished_requests()
    with Ranks(2) as ranks:
        (first, sums), (second, others) = ranks.run(2, on_a_rank, model, tmp_path / "two")
    assert first == second == 16  # rank one alone was to stop, in step 3, and rank zero in step 20
    assert sums == others == [32, 2]

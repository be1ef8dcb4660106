"""``strop check --time``: the time of a run, measured with its models."""

from __future__ import annotations

import logging
import re

import pytest

from strop.cli.main import main
from strop.config.load import load_config
from strop.trainer.timing import measured

from messages import mentions
from runs import make_inputs, overrides

AHEAD = (
    "trainer.async_steps=1",
    "trainer.worker_group=local",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.resource_pools={learner: [1], rollout: [1]}",
    "trainer.placement={Rollout: rollout}",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_check_measures_the_run_and_writes_no_folder(inputs, tmp_path, capsys):
    options = ("algorithm.adv_estimator=grpo", "trainer.total_training_steps=100000000")
    level = logging.getLogger("strop").level
    try:
        assert main(["check", "--time", *overrides(inputs, tmp_path / "run", *options)]) == 0
    finally:
        logging.getLogger("strop").setLevel(level)
    out = capsys.readouterr().out
    assert re.search(r"generation: +[\d,]+ tok/s of 16 samples", out)
    assert re.search(r"the run: +at most \d+ days", out)
    warning = next(line for line in out.splitlines() if "this run takes" in line)
    assert mentions(warning, "total_training_steps=100000000", "data.max_response_length=4", "rollout.n=2")
    assert not (tmp_path / "run").exists()


@pytest.mark.fast("ahead")
@pytest.mark.parametrize(
    "options",
    [
        ("algorithm.adv_estimator=gae", "trainer.critic_warmup=1"),
        ("algorithm.adv_estimator=remax", "algorithm.kl_ctrl.kl_coef=0.1"),
        ("actor_rollout_ref.actor.use_dynamic_bsz=true", *AHEAD),
    ],
    ids=["critic", "greedy", "ahead"],
)
def test_any_run_can_be_measured(inputs, tmp_path, options):
    lines = [*measured(load_config(overrides(inputs, tmp_path / "run", *options)))]
    assert [line.partition(":")[0] for line in lines] == ["generation", "a step", "the run"]

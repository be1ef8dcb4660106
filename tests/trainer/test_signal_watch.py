"""The warning of iterations that cannot train."""

from __future__ import annotations

import random

import pytest

from strop.config.load import load_config
from strop.trainer.watches import CutWatch, PicturesWatch, SignalWatch, StallWatch, equal_scores

from messages import mentions

CONFIG = load_config(
    [
        "actor_rollout_ref.model.path=m",
        "data.train_files=f",
        "data.max_response_length=32",
        "environment.turn_length=7",
    ]
)


def iteration(scores: tuple[float, float], advantages: tuple[float, float]) -> dict[str, float]:
    names = ("critic/score/min", "critic/score/max", "critic/advantages/min", "critic/advantages/max")
    return dict(zip(names, (*scores, *advantages), strict=True))


FLAT = iteration((0.0, 0.0), (-0.3, 0.2))  # the critic's advantages differ, the scores do not
EQUAL_IN_GROUPS = iteration((0.0, 1.0), (0.0, 0.0))
GOOD = iteration((0.0, 1.0), (-1.0, 1.0))


def test_it_warns_after_so_many_iterations_in_a_row_and_when_they_have_doubled():
    watch = SignalWatch(3)
    steps = [FLAT, FLAT, GOOD, *[FLAT] * 12]
    assert [number for number, step in enumerate(steps) if watch(step)] == [5, 8, 14]
    assert "all advantages are 0" in [watch(GOOD), watch(EQUAL_IN_GROUPS), SignalWatch(1)(EQUAL_IN_GROUPS)][2]
    assert "score 0" in SignalWatch(1)(FLAT)


def test_equal_scores_are_shown_with_a_sample_and_what_they_mean():
    sample = {"prompt": "1 + 2 =", "response": "x" * 1000, "ground_truth": "3", "score": 0.0}
    lines = equal_scores(iteration((0.0, 0.0), (0.0, 0.0)), sample).splitlines()
    assert mentions(lines[0], "score 0", "advantages", "gradient")
    assert lines[1:] == ["  prompt: 1 + 2 =", f"  answer: {'x' * 200} ... {'x' * 200}", "  truth: 3"]
    assert "advantages" not in equal_scores(FLAT, sample)  # a critic's differ


def test_a_run_that_had_scored_names_its_rate():
    watch = SignalWatch(2, rate="optim.lr=0.1")
    line = [watch(step) for step in (GOOD, FLAT, FLAT)][-1]
    assert mentions(line, "every sample has the score 0", "up to 1", "optim.lr=0.1")
    solved = iteration((1.0, 1.0), (0.0, 0.0))
    # never scored, scored too rarely for a difference, or solved
    for steps in ([FLAT, FLAT], [FLAT, FLAT, FLAT, GOOD, FLAT, FLAT], [GOOD, solved, solved]):
        watch = SignalWatch(2, rate="optim.lr=0.1")
        line = [watch(step) for step in steps][-1]
        assert line
        assert "optim.lr" not in line


def moving(score: float, entropy: float, lr: float = 1e-6) -> dict[str, float]:
    return {"critic/score/mean": score, "objective/entropy": entropy, "lr": lr}


@pytest.mark.parametrize(
    ("score", "entropy", "warns"), [(0.0, 0.0, True), (0.004, 0.0, False), (0.0, -0.004, False)]
)
def test_a_score_and_an_entropy_that_stay_are_a_warning(score, entropy, warns):
    """Both vary by 0.05 at random; ``score`` and ``entropy`` are their slopes."""
    watch, draw = StallWatch("optim.lr=1e-06", has_adapters=True), random.Random(0)
    for _ in range(10):  # the critic's warm-up does not count
        assert watch(moving(0.2, 1.0, lr=0.0)) is None
    lines = []
    for step in range(50):
        noise = draw.gauss(0, 0.05), draw.gauss(0, 0.05)
        lines.append(watch(moving(0.2 + score * step + noise[0], 1.0 + entropy * step + noise[1])))
    assert not any(lines[:-1])
    assert bool(lines[-1]) == warns
    if warns:
        assert mentions(lines[-1], "50 iterations", "optim.lr=1e-06", "modules_to_save")
        assert not any(watch(moving(0.2, 1.0)) for _ in range(200))


def test_a_slow_run_is_compared_with_the_iterations_before():
    """Within 50 iterations the score rises by half a deviation of its noise, as late in the demo."""
    watch, draw = StallWatch("optim.lr=1e-06", has_adapters=False), random.Random(0)
    score, found = 0.2, []
    for step in range(600):
        score += 0.004 if step < 50 else 0.001 if step < 400 else 0.0
        found.append(watch(moving(score + draw.gauss(0, 0.05), 1.0 + draw.gauss(0, 0.05))))
    (step,) = (step for step, line in enumerate(found, 1) if line)
    assert step > 400


def test_constant_figures_are_a_warning_and_a_run_without_entropies_gives_none():
    watch = StallWatch("optim.lr=1e-06", has_adapters=False)
    line = [watch(moving(0.2, 1.0)) for _ in range(50)][-1]
    assert mentions(line, "0.2", "optim.lr=1e-06")
    assert "modules_to_save" not in line
    watch = StallWatch("", has_adapters=False)
    assert not any(watch({"critic/score/mean": 0.2, "lr": 1.0}) for _ in range(60))


@pytest.mark.parametrize(
    ("keys", "difference", "warns"),
    [
        (["trainer.device=cpu"], 0.2, True),
        (["trainer.device=cpu"], 0.05, False),
        (["trainer.device=cuda"], 0.2, False),
        (["trainer.device=cuda"], 0.6, True),
        (["trainer.device=cuda", "actor_rollout_ref.model.compute_dtype=float32"], 0.2, True),
        (["trainer.device=cpu", "trainer.async_steps=1"], 0.6, False),  # of older weights
    ],
)
def test_a_sampler_that_sees_other_pictures_is_a_warning(keys, difference, warns):
    files = ["actor_rollout_ref.model.path=m", "data.train_files=f", "actor_rollout_ref.rollout.name=hf"]
    watch = PicturesWatch(load_config([*files, *keys]))
    name = "training/rollout_probs_diff_max/pictures"
    lines = [watch({name: value} if value else {}) for value in (difference, 0.0, 0.001, *[difference] * 3)]
    assert [bool(line) for line in lines] == [False, False, False, warns, False, False]
    if warns:
        assert mentions(lines[3], name, "encoder cache", "image processing", "dummy weights")


def test_single_samples_with_different_scores_and_null_do_not_warn():
    watch = SignalWatch(2)
    assert not any(watch(iteration((score, score), (-1.0, 0.0))) for score in (0.0, 1.0, 0.0, 1.0))
    off = SignalWatch(None)
    assert not any(off(FLAT) for _ in range(20))


def test_most_answers_cut_is_a_warning_with_the_key():
    watch, share = CutWatch(CONFIG), "response_length/clip_ratio"
    assert watch({share: 0.5}) is None
    assert mentions(watch({share: 0.938}), "94%", "data.max_response_length=32")
    assert watch({share: 0.938}) is None  # once
    for by_turn, key in ((0.3, "data.max_response_length=32"), (0.6, "environment.turn_length=7")):
        found = {share: 0.9, "turns/cut": by_turn}
        assert mentions(CutWatch(CONFIG)(found), "90%", key)
    agent = CONFIG.model_copy(update={"agent": CONFIG.agent.model_copy(update={"command": "x"})})
    assert mentions(CutWatch(agent)(found), "90%", "max_tokens of the program's requests")


def test_a_share_of_cut_answers_that_doubles_names_the_penalty():
    watch = CutWatch(CONFIG)
    assert [watch({"response_length/clip_ratio": share}) for share in (0.26, 0.4)] == [None, None]
    line = watch({"response_length/clip_ratio": 0.52})
    assert mentions(line, "26%", "52%", "data.max_response_length=32", "reward_model.non_stop_penalty=True")
    alone = CONFIG.reward_model.model_copy(update={"reward_manager": "none"})
    watch = CutWatch(CONFIG.model_copy(update={"reward_model": alone}))
    assert watch({"response_length/clip_ratio": 0.26}) is None
    line = watch({"response_length/clip_ratio": 0.52})
    assert mentions(line, "52%", "data.max_response_length=32")
    assert "score" not in line  # a teacher pays for nothing

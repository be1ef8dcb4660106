"""The warning of iterations that cannot train."""

from __future__ import annotations

from strop.trainer.metrics import SignalWatch, cut_answers

from messages import mentions


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


def test_single_samples_with_different_scores_and_null_do_not_warn():
    watch = SignalWatch(2)
    assert not any(watch(iteration((score, score), (-1.0, 0.0))) for score in (0.0, 1.0, 0.0, 1.0))
    off = SignalWatch(None)
    assert not any(off(FLAT) for _ in range(20))


def test_most_answers_cut_is_a_warning_with_the_key():
    assert cut_answers({"response_length/clip_ratio": 0.5}, 32) is None
    line = cut_answers({"response_length/clip_ratio": 0.938}, 32)
    assert mentions(line, "94%", "data.max_response_length=32")

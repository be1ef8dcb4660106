from __future__ import annotations

import time

import pytest

from strop.rewards.score.choice import compute_score, extract_label

from messages import naming

MARKED = [
    ("Answer: C", "C"),
    ("C", "C"),
    (" (C).\n", "C"),
    ("**C**", "C"),
    ("The answer is C.", "C"),
    ("the answer is: (C)", "C"),
    ("**Answer:** C", "C"),
    ("**Answer**: **C**", "C"),
    ("Answer: \\boxed{C}", "C"),
    ("Answer: $\\boxed{\\text{C}}$", "C"),
    ('Answer: "C"', "C"),
    ("Answer: C. melts", "C"),
    ("Answer: A\nWait.\nAnswer: C", "C"),
    ("Answer:\nC\nB would be odd", "C"),
    ("Answer: C. That answer is certain.", "C"),
    ("Answer: C. and a man leaves.", "C"),
    ("The answer is B. A person would not do that.", "B"),
    ("Answer: (C) A man walks", "C"),
    ("**Answer: C.** A man walks", "C"),
    ("Answer: A. A man walks", "A"),
    ("Answer: option C", "C"),
    ("The answer is Option (C).", "C"),
    ("Answer: C - he sits", "C"),
    ("Answer: C — he sits", "C"),
    ("Answer: C (he sits)", "C"),
    ("The answer is C because it fits.", "C"),
    ("Answer: C, I think.", "C"),
    ("Answer: `C`", "C"),
    ("Answer: __C__", "C"),
    (r"Answer: \textbf{C}", "C"),
]
UNMARKED = [
    "",
    "C melts",
    r"\boxed{C or D}",
    "Answer:",
    "melts.",
    "c",
    "Answer: c",
    "Answer: E",
    "Answer: 2",
    "Answer: C or D",
    "Answer: (C) or (D)",
    "Answer: C, D",
    "Answer: C/D",
    "Answer: C and D.",
    "Answer: A. Answer: C or D",
    "Answer: C. A or B",
    "Answer: C, A is wrong",
    "Answer: (C) (A) man",
    "Answer: C. A",
    "Answer: C. B is wrong",
    "Answer: D, possibly A",
    "Answer: D (or A)",
    "Answer: D, but A is possible",
    "Answer: D. Or A.",
    "Answer: D\nor A",
    "Answer: D\n\nA",
    "Answer: D\n/ A",
    "Answer: D\n- A",
    "Answer: D\nOption A",
    "Answer: D, E",  # no label, but hardly a word
    "Answer: D - A",
    "Answer: D (A)",
    "Answer: option D or option A",
    "Answer: D because A is odd",
    "Answer: C_1",
    "Answer: D, or another one",
    "Answer: D\nAnswer: none",
    "Answer: D. The answer is unclear.",
    r"\boxed{D, A}",
    r"\boxed{D} or \boxed{}",
    "Answer: A man sits",
    "Answer: Canoe",
    "A B C D",
    "ABCD",
    "A man sits in a canoe",
    "I choose C",
]


FLEXIBLE = [
    (r"so \boxed{B}, no: \boxed{C}", "C"),
    ("I think so.\n\n(C)", "C"),
    ("C. melts.", "C"),
    ("(C) melts.\nThat is all.", "C"),
    ("**C:** melts", "C"),
]


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        *((text, label, label) for text, label in MARKED),
        *((text, None, None) for text in UNMARKED),
        *((text, None, label) for text, label in FLEXIBLE),
    ],
)
def test_a_choice_is_one_label_that_is_marked(text, strict, flexible):
    assert extract_label(text) == strict
    assert extract_label(text, method="flexible") == flexible


def test_the_ground_truth_is_a_label_or_counts_from_0():
    for truth in ("C", " C ", "2", 2):
        assert compute_score("Answer: C", truth, score=2.0) == 2.0
        assert compute_score("Answer: B", truth, score=2.0) == 0.0
    assert compute_score("Answer: 2", "2", labels="1234") == 1.0
    assert compute_score("Answer: 3", "2", labels="1234") == 0.0


@pytest.mark.parametrize("truth", ["E", "4", "", None, "-1", "CD", "c"])
def test_a_ground_truth_that_is_no_choice_is_an_error(truth):
    with pytest.raises(ValueError, match=naming("A, B, C, D")):
        compute_score("Answer: C", truth)
    with pytest.raises(ValueError, match=naming("'loose'")):
        compute_score("Answer: C", "C", method="loose")


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("piece", [" ", "\n", "\t ", "*", "- ", "( ", "option "])
@pytest.mark.parametrize("first", ["The answer is", "Answer:", "Answer: C\n", "Answer: C", "C", "The"])
def test_the_time_for_a_response_is_linear_in_its_length(first: str, piece: str, method: str):
    texts = [first + piece * (n // len(piece)) for n in (20_000, 40_000)]
    # on a shared machine the same work takes longer at times, so the least of several times counts
    assert _is_linear(*texts, method=method, tries=1) or _is_linear(*texts, method=method, tries=5)


def _is_linear(*texts: str, method: str, tries: int) -> bool:
    half, whole = (min(_seconds(text, method) for _ in range(tries)) for text in texts)
    return whole < 0.2 or whole < 3 * half


def _seconds(text: str, method: str) -> float:
    started = time.thread_time()
    extract_label(text, method=method)
    return time.thread_time() - started

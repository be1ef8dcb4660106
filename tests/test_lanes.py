from __future__ import annotations

import pytest

from lanes import exit_status, skipped

OUTPUT = """\
..s.                                                                     [100%]
=========================== short test summary info ============================
SKIPPED [3] tests/rewards/test_a.py:52: no bwrap: apt-get install bubblewrap
SKIPPED [1] tests/b.py: needs a GPU
FAILED tests/c.py::test_c - SKIPPED [9] is no line of its own
4 skipped in 1.00s
"""


def test_the_last_line_counts_skipped_tests_by_their_reasons():
    other = "SKIPPED [2] tests/d.py:7: needs a GPU\n"
    line = skipped([OUTPUT, other])
    assert line == "Skipped tests: 6: 3 (no bwrap: apt-get install bubblewrap); 3 (needs a GPU)"
    assert skipped(["3 passed in 1.00s\n"]) == "Skipped tests: 0"


@pytest.mark.parametrize(
    ("statuses", "expected"), [((0, 0), 0), ((5, 0), 0), ((0, 1), 1), ((2, 5), 1), ((0, -9), 1), ((-9, 1), 1)]
)
def test_a_lane_that_fails_or_is_killed_fails_the_suite(statuses: tuple[int, int], expected: int):
    assert exit_status(statuses) == expected

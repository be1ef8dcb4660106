"""Parameters of requests."""

from __future__ import annotations

import pytest

from strop.agents.chat import Refusal, asked

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stop", [5, {"a": 1}, True, ["a", ""], [None]])
def test_a_stop_that_is_no_text_is_refused(stop):
    with pytest.raises(Refusal, match="expected texts") as refused:
        asked({"messages": HI, "stop": stop})
    assert refused.value.status == 400


def test_a_limit_that_is_null_leaves_the_other_one():
    assert asked({"messages": HI, "max_completion_tokens": None, "max_tokens": 5}).max_tokens == 5
    assert asked({"messages": HI, "max_completion_tokens": 3, "max_tokens": 5}).max_tokens == 3


def test_a_seed_is_the_runs_unless_it_may_be_named():
    with pytest.raises(Refusal, match="seed=1 is not served"):
        asked({"messages": HI, "seed": 1})
    asked({"messages": HI, "seed": 1}, seeded=True)

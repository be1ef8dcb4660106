"""What the package math-verify judges wrongly: the table in ``docs/data.md``, read from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.rewards.score import math

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data.md"
_ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \|", re.MULTILINE)


def documented() -> list[tuple[str, str, str]]:
    return _ROW.findall(DOCUMENT.read_text(encoding="utf-8").partition("### Known errors of math-verify")[2])


def test_the_table_is_found():
    assert len(documented()) == 13


@pytest.mark.parametrize(("answer", "truth", "verdict"), documented())
def test_the_documented_verdicts_are_those_of_the_package(answer, truth, verdict):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    response = rf"so \boxed{{{answer}}}"
    assert math.compute_score(response, truth, method="math-verify") == float(verdict == "right")
    assert math.compute_score(response, truth) == 0.0


def test_the_package_is_asked_only_when_the_texts_differ(monkeypatch):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    asked = []
    monkeypatch.setattr(math, "same_value", lambda found, expected: asked.append(found))
    assert math.compute_score(r"\boxed{\dfrac12}", "0.5", method="math-verify") == 1.0
    assert asked == []
    assert math.compute_score(r"\boxed{0.25}", "1/4", method="math-verify") == 0.0
    assert asked == ["0.25"]

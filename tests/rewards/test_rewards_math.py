from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards_support import last_box_by_walking, real_rows

from strop.errors import MissingExtraError
from strop.rewards.score import choice, exact, gsm8k, math
from strop.rewards.score.math import compute_score, last_boxed
from strop.rewards.score.normal_form import normalize_answer

from messages import naming

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{4}, no: \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\{x : x > 0}", r"\{x : x > 0"),  # an escaped brace is text
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$ and more", "5"),
        (r"\boxed 5" + "\nmore", "5"),
        (r"\fbox{5}", "5"),
        (r"\fbox{4} \boxed{5}", "5"),
        (r"\boxed{4} \fbox{5}", "5"),
        (r"\boxed{x = \boxed{5}}", None),  # which one is the answer?
        (r"\boxed{\boxed{5}}", None),
        (r"\boxed{4 or \boxed{5}", None),
        (r"\boxed{4} then \boxed{5", None),  # cut at the length limit
        (r"\boxed{}", None),
        (r"\boxed", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_answer_is_in_the_last_box(text: str, answer: str | None):
    assert last_boxed(text) == answer


SAME = [
    # Hendrycks et al.
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\frac1{2x}", r"\frac{1}{2x}"),
    (r"\frac{\frac12}3", r"\frac{\frac{1}{2}}{3}"),
    (r"\frac\pi4", r"\frac{\pi}{4}"),
    ("4:30 PM", r"\text{4:30 p.m.}"),
    (r"9\text{ a.m.}", "9 AM"),
    ("0.5", r"\frac{1}{2}"),
    (".5", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("-3/4", r"-\frac{3}{4}"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\sqrt x", r"\sqrt{x}"),
    (r"\left( 1 , 2 \right]", "(1,2]"),
    (r"10\!", "10"),
    (r"45^\circ", "45"),
    (r"45^{\circ}", "45"),
    ("45°", "45"),
    (r"50\%", "50"),
    ("50%", "50"),
    (r"\$5", "5"),
    ("$5$", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\mbox{ inches}^2", "5"),
    (r"8\sqrt{3} \text { square inches}", r"8\sqrt{3}"),
    (r"3\pi\text{ m}", r"3\pi"),
    (r"1920\text{ ways.}", "1920"),
    ("x = 5", "5"),
    (r"x \in [1,2)", "[1,2)"),
    ("5.", "5"),
    (r"\\frac{1}{2}", r"\frac{1}{2}"),  # escaped twice
    # ours
    (r"\text{even}", "even"),
    (r"\text{(C)}", "C"),
    (r"(\text{E})", r"\text{E}"),
    ("12,345", "12345"),
    (r"12,\!345", "12345"),
    ("12{,}345", "12345"),
    (r"\frac{12}{5,\!525}", r"\frac{12}{5525}"),
    ("5 3/4", r"5\frac34"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"\frac{1}{-2}", r"-\frac{1}{2}"),
    ("7.50", "7.5"),
    ("3.0", "3"),
    ("1011_{2}", "1011_2"),
    (r"\%", r"\%"),
    ("x^{2}", "x^2"),
    (r"x \leq 3", r"x \le 3"),
    ("−5", "-5"),
    ("2π", r"2\pi"),
    ("(1/2, -3/4)", r"(\frac{1}{2}, -\frac{3}{4})"),
    (r"\begin{pmatrix} 1/5 \\ 0 \end{pmatrix}", r"\begin{pmatrix}\frac15\\0\end{pmatrix}"),
    (r"\begin{bmatrix} 0.2 \\ 0 \end{bmatrix}", r"\begin{pmatrix}\frac15\\0\end{pmatrix}"),
    ("+2", "2"),
    ("(2)", "2"),
    ("-(2)", "-2"),
    (r"\left(-\frac12\right)", r"-\frac12"),
    (r"\frac{4}{6}", r"\frac23"),
    (r"\frac{10}{2}", "5"),
    ("1.5", r"\frac32"),
    (r"1\frac12", r"\frac32"),
    ("-1 1/2", r"-\frac32"),
    (r"9\cdot\pi", r"9\pi"),
    (r"2 \times\sqrt3", r"2\sqrt{3}"),
    (r"6\cdot x^2 \cdot y", "6x^2y"),
    (r"(x+1) \cdot (x-1)", "(x+1)(x-1)"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    (r"(1+\sqrt5)/2", r"\frac{1+\sqrt{5}}{2}"),
    (r"\frac{-\sqrt2}{2}", r"-\frac{\sqrt{2}}{2}"),
    ("5 dollars", "5"),
    ("5 cm", "5"),
    (r"\text{5 square feet}", "5"),
    (r"(x,y) = (1,2)", "(1,2)"),
    ("10 000", "10000"),
    (r"x^{12}", "x^12"),
    ("45,135", r"45^\circ, 135^\circ"),
    ("70, 110", "70,110"),  # MATH writes lists as it writes thousands
    (r"-2, 1 \text{ and } 5", "-2,1,5"),
    (r"7, -2, \text{ and } -5", "7,-2,-5"),
    (r"(1,\frac{-3}{2})", r"(1,-\frac{3}{2})"),
    (r"2+\frac{-1}{2}i", r"2-\frac12i"),
    (r"2{\sqrt3}", r"2\sqrt{3}"),
    (r"{3}/{4}", r"\frac34"),
    ("{x = 5}", "5"),
    ("f(2) = 5", "5"),
    (r"\text{5 cups of tea}", "5"),
    (r"\text{5 km/h}", "5"),
    (r"27\text{°C}", "27"),
    ("√10", r"\sqrt{10}"),
    (r"\text{Even}", "even"),
    (r"\left(\begin{array}{rr}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\left[ \begin{matrix}1\\2\end{matrix} \right]", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (
        r"\begin{pmatrix}\frac{-1}{5}\\[4pt]\frac{-2}{5}\\\end{pmatrix}",
        r"\begin{pmatrix}-1/5\\-2/5\end{pmatrix}",
    ),
    ("5\\ ", "5"),
    ("x ∈ [1，2)", "[1,2)"),
    ("（1，2）", "(1,2)"),
    ("∅", r"\emptyset"),
    ("θ = 5", "5"),
    ("2αβ+θ", r"2\alpha\beta + \theta"),
    ("x⁴+x⁵-x⁶", "x^4+x^5-x^6"),
    ("2x⁷+x⁸-x⁹", "2x^7+x^8-x^9"),
    ("¼", "0.25"),
    ("1¾", r"\frac{7}{4}"),
    ("⅓, ⅔", r"\frac13, \frac23"),
    (r"\frac{1,023}{1,024}", r"\frac{1023}{1024}"),
    ("1,023/1,024", r"\frac{1023}{1024}"),
    (r"1,200\sqrt{3}", r"1200\sqrt3"),
    ("1,200x+5", "1200x+5"),
    (r"\(1,200x+5\)", "1200x+5"),
    (r"-1,000,000\pi(x+1) + 2,500.5", r"-1000000\pi(x+1) + 2500.5"),
    (r"\sqrt[3]{1,200}", r"\sqrt[3]{1200}"),
    ("100,200x", "100, 200x"),
    ("P = (100,200)", "P = (100, 200)"),
    (r"\langle 100,200 \rangle", r"\langle 100, 200 \rangle"),
]

DIFFERENT = [
    ("5", "6"),
    ("12", "1"),
    ("1,2", "12"),
    ("(1,2)", "(1,2]"),
    ("-5", "5"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("4:30 PM", "4:30 AM"),
    ("4:30 p.m.", "4:30"),
    (r"12\text{ and }13", "12"),  # the first rule of the original loses the 13
    (r"\text{even}", r"\text{odd}"),
    ("10", "1"),
    ("100", "10"),
    ("0.05", "0.5"),
    ("1011_2", "1011_3"),
    ("2^3/4", r"2^{\frac{3}{4}}"),
    ("x=5", "y+5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}"),
    (r"2\text{ or 3}", "2"),
    (r"2\text{ or three}", "2"),
    (r"2\text{ million}", "2"),
    ("2 million", "2"),
    (r"2\text{k}", "2"),
    (r"2\text{ (maybe)}", "2"),
    ("2 or 3", "2"),
    ("2, 3", "2"),
    ("2 3", "23"),
    (r"2\cdot 3", "23"),
    ("2-3", "2"),
    ("3=2", "2"),
    ("2=2", "2"),
    (r"\neq 2", "2"),
    (r"x\neq 2", "2"),
    ("x>2", "2"),
    (r"\pm 2", "2"),
    ("1+1", "2"),
    (r"\sqrt{4}", "2"),
    ("2!", "2"),
    ("2e3", "2"),
    ("2:30", "2"),
    ("1:03", "1:3"),
    ("2x", "2"),
    ("2 ab", "2"),  # variables
    ("0.33", r"\frac13"),
    (r"50\%", r"\frac12"),  # in MATH, 50% is 50
    (r"10/2^2", r"5^2"),
    ("x/2y", r"\frac{x}{2y}"),
    (r"9\text{ a.m.}", r"9\text{ p.m.}"),
    ("1,234", "(1,234)"),
    ("1,2,3", "123"),
    (r"\{100,200\}", "100200"),
    ("P = (100,200)", "P = (100200)"),
    ("f(100,200)", "f(100200)"),
    ("x,200", "x200"),
    ("0,100x+5", "0100x+5"),
    ("100,200,3x", "100200,3x"),
    ("1,23x", "123x"),
    ("1,2345x", "12345x"),
    ("1" * 500, "2" * 500),
    ("x+1", "1+x"),  # text is compared, not values
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\%", r"\$"),  # nothing but signs
    ("45135", "45, 135"),
    ("45, 135", "45135"),
    ("2/1/1", "2"),
    ("1/2/3", r"\frac32"),
    (r"2\text{ and }", "2"),
    (r"2\text{ and a half}", "2"),
    (r"\text{2 million}", "2"),
    (r"\text{2x}", "2"),
    ("2{3}", "23"),
    ("ABC", "abc"),
    (r"\begin{vmatrix}1\\2\end{vmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_spellings_of_one_answer_are_the_same(left: str, right: str):
    assert compute_score(rf"thus \boxed{{{left}}}", right) == 1.0
    assert compute_score(rf"thus \boxed{{{right}}}", left) == 1.0


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different_answers_stay_different(left: str, right: str):
    assert compute_score(rf"thus \boxed{{{left}}}", right) == 0.0
    assert compute_score(rf"thus \boxed{{{right}}}", left) == 0.0


def test_only_the_boxed_answer_counts():
    assert compute_score("the answer is 5", "5") == 0.0
    assert compute_score(r"\boxed{5}", 5, score=2.0) == 2.0


@pytest.mark.parametrize(("answer", "score"), [("33", 1), ("033", 1), ("0033", 1), ("3", 0), ("330", 0)])
def test_a_ground_truth_with_leading_zeros_is_the_number(answer: str, score: int):
    """AIME's answers have three digits."""
    assert compute_score(rf"\boxed{{{answer}}}", "033") == score
    assert gsm8k.compute_score(f"#### {answer}", "033") == score
    assert compute_score(rf"\boxed{{{answer}}}", "33") == (answer == "33")


def test_a_ground_truth_may_be_a_list_of_one_and_of_no_more():
    for scorer, response in ((math, r"\boxed{2}"), (gsm8k, "#### 2"), (exact, "2"), (choice, "Answer: C")):
        assert scorer.compute_score(response, ["2"]) == 1.0
        for truth in (["2", "3"], {"answer": "2"}):
            with pytest.raises(ValueError, match=type(truth).__name__):
                scorer.compute_score(response, truth)


@pytest.mark.parametrize("truth", [None, "", "  ", r"\boxed{}", r"\boxed{5"])
def test_a_ground_truth_without_an_answer_is_an_error(truth: object):
    with pytest.raises(ValueError, match="answer"):
        compute_score(r"\boxed{5}", truth)


def test_an_unknown_method_is_an_error():
    with pytest.raises(ValueError, match=naming("'sympy'")):
        compute_score(r"\boxed{5}", "5", method="sympy")


def documented_errors() -> list[tuple[str, str, str]]:
    """Rows of the table of math-verify's known errors."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("### Known errors of math-verify")[2]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \|", table, re.MULTILINE)
    assert len(rows) == 8
    return rows


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [
        (r"2\sqrt{2}", r"\sqrt{8}", "right"),
        ("1+x", "x+1", "right"),
        ("-6s+3m", "3m-6s", "right"),
        (r"y = 1+x", "y=x+1", "right"),
        (r"(2\sqrt{2}, 1)", r"(\sqrt{8}, 1)", "right"),
        (r"\{2\sqrt{2}\}", r"\sqrt{8}", "wrong"),
        (r"2\sqrt{2}, 5", r"\sqrt{8}", "wrong"),
        (r"2\sqrt{2}\text{ or }5", r"\sqrt{8}", "wrong"),
        (r"2\sqrt{2}\text{ million}", r"\sqrt{8}", "wrong"),
        (r"5 = 2\sqrt{2}", r"\sqrt{8}", "wrong"),
        (r"2\sqrt{2} = \sqrt{8}", r"\sqrt{8}", "wrong"),
        (r"2\sqrt{2} : 1", r"\sqrt{8}", "wrong"),
        (r"1.414214", r"\sqrt{2}", "wrong"),
        ("3=2", "2", "wrong"),
        (r"\neq 2", "2", "wrong"),
        ("2+2", "4", "wrong"),
        ("1, 2+2", "1, 4", "wrong"),
        (r"1, 4 \quad 5", "1, 4", "wrong"),
        (r"(1, 2\sqrt{2})", r"(1, \sqrt{8})", "right"),
        ("1,1,2", "1,2", "wrong"),
        ("(1,2)", r"\{1,2\}", "wrong"),
        ("1011_2", "1011_3", "wrong"),
        ("0.3333333", r"\frac{1}{3}", "wrong"),
        (r"2\sqrt{2}", r"\sqrt{7}", "wrong"),
        *documented_errors(),
    ],
)
def test_math_verify_compares_values_with_its_documented_errors(answer: str, truth: str, verdict: str):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    response = rf"so \boxed{{{answer}}}"
    assert compute_score(response, truth, method="math-verify") == float(verdict == "right")
    assert compute_score(response, truth) == 0.0


def test_math_verify_is_called_only_for_texts_that_differ(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")
    compared = []
    monkeypatch.setattr(math, "same_value", lambda found, expected: compared.append(found))
    assert compute_score(r"\boxed{\dfrac12}", "0.5", method="math-verify") == 1.0
    assert compared == []
    assert compute_score(r"\boxed{1+x}", "x+1", method="math-verify") == 0.0
    assert compared == ["1+x"]


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"strop\[math\]"):
        compute_score(r"\boxed{5}", "6", method="math-verify")


def test_every_solution_of_the_data_set_scores_1_and_a_changed_answer_0():
    rows = real_rows("math_test", "test.jsonl")
    assert len(rows) == 5000
    for row in rows:
        truth = last_box_by_walking(row["solution"])
        assert compute_score(row["solution"], truth) == 1.0, row
        assert compute_score(row["solution"], row["solution"]) == 1.0, row
        assert compute_score(row["solution"], truth + "+7") == 0.0, row


def test_normalising_twice_changes_nothing_on_the_data_set():
    for row in real_rows("math_test", "test.jsonl"):
        once = normalize_answer(last_box_by_walking(row["solution"]))
        assert normalize_answer(once) == once


@given(st.text(alphabet="\\{}()[]$%^_/,.=-& 0123ab", max_size=40), st.sampled_from(["", r"\frac", r"\text{"]))
def test_any_text_can_be_normalised(text: str, command: str):
    for answer in (text + command, command + text):
        assert not set(normalize_answer(answer)) & set("$%")


@pytest.mark.parametrize(
    "answer",
    [
        "^{" * 98 + "}" * 98,
        "{a" * 130 + "}" * 130,
        r"\frac{" * 57 + "1" + "}{2}" * 57,
        "(" * 199 + "2" + ")" * 199,
        "2 abc" + " ." * 190,
        "9" * 190 + "/" + "7" * 190,
        "1" * 100_000,
        "/" * 399,
        "1/0",
        r"\frac10",
        r"\frac",
        "٣",
        "\0",
    ],
)
def test_no_answer_is_an_error(answer: str):
    assert compute_score(rf"\boxed{{{answer}}}", "7") == 0.0
    assert compute_score("\\boxed{" * 20_000 + answer, "7") == 0.0

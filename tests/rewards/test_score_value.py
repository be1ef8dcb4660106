"""Right and wrong answers of the kinds that people report as misjudged: by value, and never more."""

from __future__ import annotations

import pytest

from strop.rewards.score.math import compute_score

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'strop[math]'")

RIGHT = [  # answer, ground truth
    # complex numbers
    ("12.0 - 1.0i", "12 - i"),
    ("2i+3", "3+2i"),
    (r"\frac{1}{2}+\frac{\sqrt{3}}{2}i", r"e^{i\pi/3}"),
    (r"-i\sqrt{2}", r"-\sqrt{2}i"),
    (r"3 + 2\mathrm{i}", "3+2i"),
    (r"\frac{1-i}{2}", r"\frac{1}{1+i}"),
    # alternatives, lists, sets, unions
    (r"a=-4 \text{ or } a=3", r"a=3 \text{ or } a=-4"),
    ("2, 5", r"\{2,5\}"),
    (r"\{5, 2\}", r"\{2,5\}"),
    (r"x = 2 \text{ or } x = -3", r"\{-3, 2\}"),
    (r"1\text{ and }-1", "-1, 1"),
    (r"\{1\} \cup \{2,3\}", r"\{1,2,3\}"),
    (r"(3,4)\cup(1,2)", r"(1,2)\cup(3,4)"),
    (r"\left(-\infty,-1\right)\cup\left(\frac{2}{2},\infty\right)", r"(-\infty,-1) \cup (1,\infty)"),
    (r"\pm 2", "2, -2"),
    (r"x = -2 \text{ or } 2", r"x=\pm 2"),
    (r"1+\sqrt{2},\ 1-\sqrt{2}", r"1\pm\sqrt{2}"),
    (r"y=3,\ x=1", "x=1, y=3"),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
    (r"\frac{\pi}{6}, \frac{5\pi}{6}", r"\frac{5\pi}{6} \text{ and } \frac{\pi}{6}"),
    # notation
    (r"\exp(14) - 1", "e^{14} - 1"),
    (r"\exp\left(\frac{1}{2}\right)", r"\sqrt{e}"),
    (r"\pi \div 6 + 1 \div 2", r"0.5 + \frac{\pi}{6}"),
    (r"3\div 4", r"\frac{3}{4}"),
    ("**73**", "73"),
    ("`73`", "73"),
    ("sqrt(19)", r"\sqrt{19}"),
    ("2*sqrt(3)/3", r"\frac{2}{\sqrt{3}}"),
    ("2*pi", r"2\pi"),
    ("x**2 + 1", "x^2+1"),
    (r"2 - \frac{1}{\mathrm{e}}", "2 - e^{-1}"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    # values
    (r"\sqrt{\frac{1}{m}}", r"\frac{1}{\sqrt{m}}"),
    (r"\sqrt{1/m}", r"\frac{\sqrt{m}}{m}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\log_2 8x", r"3+\log_2 x"),
    (r"3x^2", r"x^2 \cdot 3"),
    (r"\frac{\sqrt{5}}{5}", r"\frac{1}{\sqrt{5}}"),
    (r"7 \sin\left(\frac{\pi x}{4}\right)+2", r"7\sin(\frac{\pi}{4}x)+2"),
    (r"\tan^{-1}(2)", r"\arctan 2"),
    ("2^{-60}", r"\frac{1}{2^{60}}"),
    (r"\binom{10}{3}", r"\frac{10!}{3!\,7!}"),
    # equations and inequalities
    ("2x-3y=-7", "2x-3y+7=0"),
    ("4x - 6y + 14 = 0", "2x-3y+7=0"),
    ("2x + 1 = y", "y=2x+1"),
    (r"y - 2x - 1 = 0", "y=2x+1"),
    (r"\frac{x^2}{4} + \frac{y^2}{9} = 1", "9x^2+4y^2=36"),
    ("-2x < -6", "x>3"),
    (r"3 \ge x", r"x \leq 3"),
    ("x>5", r"(5,\infty)"),
    (r"x \in [5, 7)", r"5 \le x < 7"),
    (r"7 > x \ge 5", "[5,7)"),
    (r"x<-1 \text{ or } x>2", r"(-\infty,-1)\cup(2,\infty)"),
    (r"\{x \mid x > 5\}", "x>5"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    # percent, degrees, powers of ten, thousands
    ("0.05", r"5\%"),
    (r"50\%", r"\frac{1}{2}"),
    (r"\frac{\pi}{2}", r"90^\circ"),
    (r"60^{\circ}", r"\frac{\pi}{3}"),
    (r"3 \times 10^8", "300000000"),
    ("3e-20", r"3\cdot10^{-20}"),
    (r"6.63 \cdot 10^{-34}", r"663 \times 10^{-36}"),
    (r"1{,}234{,}567", "1234567"),
    # matrices, tuples, words, labels
    (
        r"\begin{bmatrix} \sqrt{8} & 0 \\ 1 & 2 \end{bmatrix}",
        r"\begin{pmatrix} 2\sqrt{2} & 0 \\ 1 & 2 \end{pmatrix}",
    ),
    (r"\left(\frac{1}{\sqrt{2}}, \frac{\pi}{4}\right)", r"\left(\frac{\sqrt{2}}{2}, \frac{\pi}{4}\right)"),
    (r"(x, y) = (1, 2)", "(1,2)"),
    (r"\textbf{(C)}", "C"),
    ("(B).", r"\text{B}"),
    ("YES", r"\text{Yes}"),
    (r"\text{no solution}", r"\emptyset"),
    (r"2\frac{1}{2}", "2.5"),
    (r"\$1,250.00", "1250"),
    ("5 min", r"5\text{ minutes}"),
    ("x²+1", "1+x^2"),
    (r"x \leqslant 3", r"(-\infty, 3]"),
    (r"\mathbb{R} \setminus \{2\}", r"x \ne 2"),
    ("(10110)_2", "10110_2"),
    ("x=y", "y=x"),
]

WRONG = [
    # magnitudes
    (r"5\cdot10^{-20}", r"3\cdot10^{-20}"),
    (r"9.1\times10^{-31}", r"6.6\times10^{-34}"),
    (r"\frac{1}{3^{60}}", r"\frac{1}{2^{60}}"),
    (r"\frac{1}{2001!}", r"\frac{1}{1999!}"),
    (r"\frac{1}{3 \cdot 2^{2000}}", r"\frac{2^{1999}+1}{3 \cdot 2^{2000}}"),
    (r"10^{100}+e", r"10^{100}+\pi"),
    (r"\pi + 10^{-90}", r"\pi"),
    ("3.14159265358979", r"\pi"),
    ("1.41421356237", r"\sqrt{2}"),
    # complex numbers
    ("12+i", "12-i"),
    ("2+3i", "3+2i"),
    ("(3,2)", "3+2i"),
    # alternatives, lists, sets, unions
    ("a=3", r"a=3 \text{ or } a=-4"),
    (r"\{5\}", "5"),
    ("2, 3, 4", "n=3, 4, 5"),
    ("20, 35, and 83", r"18, 45, \text{ and } 83"),
    ("1, 1, 2", "1, 2"),
    ("1,2", r"\{1,2,3\}"),
    ("2", r"\pm 2"),
    (r"\pm 2", "2"),
    ("x=3, y=1", "x=1, y=3"),
    ("3, 1", "x=1, y=3"),
    (r"\{(2,1),(3,4)\}", r"\{(1,2),(3,4)\}"),
    (r"(1,2)\cap(3,4)", r"(1,2)\cup(3,4)"),
    ("1, 3, 5, \\ldots, 2n-1", "1, 2, \\ldots, n"),
    ("(1,2)", r"\{1,2\}"),
    (r"1, \{2, 3\}", r"\{1,2,3\}"),
    # intervals, tuples
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "[1,2)"),
    (r"D=(0, 2.5)", "D=(0, 2)"),
    (r"(4, \frac{2\pi}{3})", r"\left( 4, \frac{\pi}{3} \right)"),
    (r"x \ge 5", r"(5,\infty)"),
    (r"5 \le x \le 7", "[5,7)"),
    (r"x<-1 \text{ and } x>2", r"x<-1 \text{ or } x>2"),
    (r"-1 < x < 2", r"(-\infty,-1)\cup(2,\infty)"),
    # equations and inequalities
    ("2x-3y=7", "2x-3y+7=0"),
    ("2x+3y+7=0", "2x-3y+7=0"),
    ("y=5", "x=5"),
    ("x<3", "x>3"),
    ("-2x > -6", "x>3"),
    (r"x \geq 3", "x>3"),
    ("x = 3", "x>3"),
    (r"x \ne 3", "x=3"),
    ("f(x)=0", r"\forall x>0, f(x)=0"),
    ("4", "n=4k"),
    ("2=2", "x=x+1"),
    ("0=0", "2x-3y+7=0"),
    ("y=2x", "y=2x+1"),
    ("x^2=4", "x=2"),
    # values
    (r"3\sqrt(5)", "3"),
    ("x", r"\sqrt{x^2}"),
    ("|x|", "x"),
    (r"\sqrt{m}", r"\frac{1}{\sqrt{m}}"),
    (r"\sin x^2", r"\sin^2 x"),
    (r"\log_2 x", r"\log_3 x"),
    (r"(-1)^{n}", r"(-1)^{n+1}"),
    ("x+y", "x-y"),
    ("ab^2", "(ab)^2"),
    ("2^{3x}", "2^{x+3}"),
    ("n!", "(n+1)!"),
    ("AB", "BA"),
    ("x'", "x"),
    # notation
    ("11:00", "2:00"),
    ("1011_2", "1011_3"),
    ("1011_2", "11"),
    ("0.5", r"5\%"),
    (r"5\%", "0.5"),
    (r"45^\circ", r"\frac{\pi}{3}"),
    (r"3\times10^8", "30000000"),
    (r"2\text{ million}", "2"),
    ("0.16", r"0.1\overline{6}"),
    ("1.234", "1,234"),
    (r"x^2 \cdot 3", "x^{23}"),
    (r"\log_2 8x", r"\log_{28} x"),
    (r"2\frac{1}{2}", r"2 \cdot \frac{1}{2}"),
    # matrices, words, labels
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\text{no}", r"\text{on}"),
    (r"(A) \text{ or } (B)", "A"),
    ("A, B", "A"),
    ("D", "C"),
    (r"\text{no solution}", "0"),
    (r"\text{yes}", r"\text{no}"),
    # units and precision
    (r"5\text{ m}", r"5\text{ cm}"),
    ("5 hours", "5 minutes"),
    ("x+10^{-50}", "x"),
    ("x=10^{50}+1", "x=10^{50}"),
]


@pytest.mark.parametrize(("answer", "truth"), RIGHT)
def test_right_answers_score(answer: str, truth: str):
    assert compute_score(rf"so \boxed{{{answer}}}", truth, method="math-verify") == 1.0


@pytest.mark.parametrize(("answer", "truth"), WRONG)
def test_wrong_answers_do_not(answer: str, truth: str):
    assert compute_score(rf"so \boxed{{{answer}}}", truth, method="math-verify") == 0.0
    assert compute_score(rf"so \boxed{{{truth}}}", answer, method="math-verify") == 0.0


@pytest.mark.parametrize("method", ["hendrycks", "math-verify"])
def test_samples_whose_ground_truth_is_a_sentence_are_left_out(method: str):
    truth = r"\text{The sequence grows without any bound}"
    assert compute_score(r"\boxed{7}", truth, method=method) is None
    assert compute_score(rf"\boxed{{{truth}}}", truth, method=method) is None
    assert compute_score(r"\boxed{12}", r"12\text{ apples in every large basket}", method=method) == 1.0
    assert compute_score(r"\boxed{7}", r"\text{no real solution}", method=method) == 0.0
    for truth in ("Yes, because the sum is even", r"\text{Two~lines that meet at\ a point}"):
        assert compute_score(r"\boxed{7}", truth, method=method) is None


@pytest.mark.parametrize("method", ["hendrycks", "math-verify"])
@pytest.mark.parametrize(
    "truth", [r"\frac{abc}{ab+bc+ca}", "AB, BC, CD, DA", r"ab+cd = ac\cdot bd", r"\triangle ABC, DEF, GH, JK"]
)
def test_products_of_letters_are_no_sentence(method: str, truth: str):
    assert compute_score(rf"\boxed{{{truth}}}", truth, method=method) == 1.0
    assert compute_score(r"\boxed{7}", truth, method=method) == 0.0

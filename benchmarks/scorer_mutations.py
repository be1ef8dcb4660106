"""Count wrong verdicts of the scorers, of verl's and of math-verify, on right and wrong spellings of answers.

    python benchmarks/scorer_mutations.py --data ../shared/data [--verl DIR] [--write docs/rewards.md]

The spellings are those of tests/rewards/mutations.py. ``--verl`` is a folder with verl's package
(``pip install --no-deps --target DIR verl``). ``math-verify`` alone is called as its README shows, with a
time-out of 5 seconds. ``--write`` replaces the tables of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rewards"))

import mutations as of
from rewards_support import last_box_by_walking

from strop.rewards.score import choice, gsm8k, math

Scorers = dict[str, Callable[[str, str], object]]
BEGIN, END = "<!-- begin: benchmarks/scorer_mutations.py -->", "<!-- end -->"


def verl_scorers(folder: Path) -> tuple[Scorers, Scorers]:
    """Return verl's scorers of GSM8K and MATH, loaded without the rest of the package."""
    modules = {}
    for name in ("gsm8k", "math_reward", "math_dapo"):
        path = folder / "verl" / "utils" / "reward_score" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return (
        {
            "verl strict": modules["gsm8k"].compute_score,
            "verl flexible": functools.partial(modules["gsm8k"].compute_score, method="flexible"),
        },
        {
            "verl math_reward": modules["math_reward"].compute_score,
            "verl math_dapo": lambda response, truth: modules["math_dapo"].compute_score(response, truth)[
                "acc"
            ],
        },
    )


def math_verify_alone(response: str, truth: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(f"${truth}$"), parse(response))


def table(
    title: str, kinds: of.Kinds, truths: list[str], around: list[str], scorers: Scorers, args
) -> list[str]:
    """Return the lines of a table: wrong verdicts in percent, by kind and in total."""
    right = "score 1" if "right" in title else "score 0"
    misjudged = {name: Counter() for name in scorers}
    counts = Counter()
    for kind, response, truth in of.mutations(kinds, truths, args.count, around=around, seed=args.seed):
        counts[kind] += 1
        for name, score in scorers.items():
            with contextlib.redirect_stdout(io.StringIO()):  # verl's scorers print their errors
                misjudged[name][kind] += (score(response, truth) > 0) != (right == "score 1")
    print(
        title, {name: sum(errors.values()) for name, errors in misjudged.items()}, file=sys.stderr, flush=True
    )
    lines = [
        f"| {title}, which must {right} | " + " | ".join(scorers) + " |",
        "| --- |" + " ---: |" * len(scorers),
        f"| **all {counts.total()}** | "
        + " | ".join(
            f"**{100 * sum(errors.values()) / counts.total():.1f}**" for errors in misjudged.values()
        )
        + " |",
    ]
    for kind, count in counts.items():
        cells = [
            f"{100 * errors[kind] / count:.0f}" if errors[kind] else "." for errors in misjudged.values()
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (args.data / name).read_text(encoding="utf-8").splitlines()]

    verl_gsm8k, verl_math = verl_scorers(args.verl) if args.verl else ({}, {})
    flexible = functools.partial(gsm8k.compute_score, method="flexible")
    gsm8k_scorers = {"`gsm8k`": gsm8k.compute_score, **verl_gsm8k}
    flexible_scorers = {
        "`gsm8k`, flexible": flexible,
        **{name: verl_gsm8k[name] for name in list(verl_gsm8k)[1:]},
    }
    math_scorers = {
        "`math`": math.compute_score,
        "`math`, math-verify": functools.partial(math.compute_score, method="math-verify"),
        **verl_math,
        "math-verify alone": math_verify_alone,
    }
    choice_scorers = {
        "`choice`": choice.compute_score,
        "`choice`, flexible": functools.partial(choice.compute_score, method="flexible"),
    }
    numbers = [row["answer"].split("\n#### ")[1].replace(",", "") for row in rows("gsm8k/test.jsonl")]
    numbers += [row["answer"].split("\n#### ")[1].replace(",", "") for row in rows("gsm8k/train.jsonl")]
    formulas = [last_box_by_walking(row["solution"]) for row in rows("math_test/test.jsonl")]
    labels = ["ABCD"[int(row["label"])] for row in rows("hellaswag/validation.first5000.jsonl")]
    lines = []
    for name, truths, around, scorers, right, wrong in (
        ("GSM8K", numbers, of.GSM8K_AROUND, gsm8k_scorers, of.GSM8K_RIGHT, of.GSM8K_WRONG),
        ("GSM8K, flexible", numbers, of.GSM8K_AROUND, flexible_scorers,
         of.GSM8K_FLEXIBLE_RIGHT, of.GSM8K_FLEXIBLE_WRONG),
        ("MATH", formulas, of.MATH_AROUND, math_scorers, of.MATH_RIGHT, of.MATH_WRONG),
        ("HellaSwag", labels, of.CHOICE_AROUND, choice_scorers, of.CHOICE_RIGHT, of.CHOICE_WRONG),
    ):  # fmt: skip
        lines += table(f"{name}: right spellings", right, truths, around, scorers, args)
        lines += table(f"{name}: wrong answers", wrong, truths, around, scorers, args)
    text = "\n".join(lines)
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        args.write.write_text(
            re.sub(pattern, lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL), encoding="utf-8"
        )
    else:
        print(text)


if __name__ == "__main__":
    main()

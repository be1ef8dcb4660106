"""A calculator as a tool: products of two numbers of three digits, which a small model cannot work out.

`python examples/calculator.py FOLDER` writes three files: `warm_up.jsonl`, sums with calls and their answers
for `strop sft`, and the products `train.jsonl` and `test.jsonl`. `examples/story.sh` runs all.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import sys
from pathlib import Path

TOOL = {
    "name": "calculate",
    "description": "Calculate with numbers.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Numbers with + - * / and brackets."}},
        "required": ["expression"],
    },
}
"""The tool as chat templates and OpenAI's API have it."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Calculate with numbers.

    Args:
        expression: Numbers with + - * / and brackets.
    """
    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value) if value == int(value) else round(value, 6))


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operands = [getattr(node, name) for name in ("left", "right", "operand") if hasattr(node, name)]
    function = _OPERATORS.get(type(getattr(node, "op", None)))
    if function is None:
        raise ValueError(f"expected numbers with + - * / and brackets, found {ast.unparse(node)}")
    return function(*map(_value, operands))


def right(last_turn: str, ground_truth: str) -> float:
    """Score a sample: the last number of the last turn is the answer."""
    numbers = re.findall(r"\d+", last_turn.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == ground_truth)


def off(expression: str) -> str:
    """Say that the calculator is off.

    Args:
        expression: Numbers with + - * / and brackets.
    """
    return "error: the calculator is off"


off.__name__ = "calculate"  # the name under which the model calls it


def call(expression: str) -> str:
    """Return a call as the model is to write it: the notation `hermes`, which the Qwen models use."""
    called = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(called)}</tool_call>"


def warm_up(n: int, seed: int) -> list[dict[str, object]]:
    """Return the turns of n conversations about sums and differences, a row for each turn."""
    draw, rows, tools = random.Random(seed), [], [{"type": "function", "function": TOOL}]
    for _ in range(n):
        one, other = sorted((draw.randint(10, 99), draw.randint(10, 99)), reverse=True)
        word, sign = draw.choice((("plus", "+"), ("minus", "-")))
        expression = f"{one} {sign} {other}"
        question = {"role": "user", "content": f"What is {one} {word} {other}?"}
        said, result = call(expression), calculate(expression)
        turns = [{"role": "assistant", "content": said}, {"role": "tool", "content": result}]
        rows.append({"prompt": [question], "tools": tools, "response": said})
        rows.append({"prompt": [question, *turns], "tools": tools, "response": f"The answer is {result}."})
    return rows


def products(n: int, seed: int) -> list[dict[str, str]]:
    """Return questions with their answers."""
    draw = random.Random(seed)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(n)]
    return [{"prompt": f"What is {one} times {other}?", "answer": str(one * other)} for one, other in pairs]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "warm_up": warm_up(200, seed=1),
        "train": products(1000, seed=2),
        "test": products(100, seed=3),
    }
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

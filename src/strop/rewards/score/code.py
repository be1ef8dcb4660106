"""Code: run the response against tests in a sandbox (:mod:`strop.rewards.sandbox`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from strop.errors import ConfigError
from strop.rewards.sandbox import (
    Limits,
    Verdict,
    require_bubblewrap,
    require_sandbox,
    run_assert_tests,
    run_stdin_tests,
)

# Matches blocks of every language: the closing fence of a skipped block would look like an opening one. The
# language is the first word of "python", "python title=a.py", "{.python .numberLines}". The indent is that of
# the items of lists around the block, and has the marker of an item that begins with the fence.
_FENCE = r"^(?P<indent>[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)*)(?P<fence>`{3,})"
_FENCED = re.compile(
    _FENCE + r"[ \t{.]*(?P<language>\w*)[^`\n]*\n(?P<content>.*?)^[ \t]*(?P=fence)",
    re.DOTALL | re.MULTILINE,
)
_FENCE_LINE = re.compile(_FENCE + r"(?P<words>[^`\n]*)$", re.MULTILINE)
_PYTHON = {"python", "python3", "py"}

TIMEOUT_S = 6.0
_START_AND_END_S = 1.0
"""Longest start and end of a sandbox, beside its time limit, unless the machine is overloaded."""


def require_ready(*, deadline_s: float, timeout_s: float = TIMEOUT_S, **_options: float) -> None:
    """Check at start-up, given the options of ``compute_score`` and the deadline of a sample.

    Raises:
        ConfigError: bubblewrap is not installed, or the deadline is before a program's time limit.
        RewardError: a sandbox cannot be started, as in a container without user namespaces.
    """
    if timeout_s + _START_AND_END_S > deadline_s:
        raise ConfigError(
            f"the tests of a program may take timeout_s={timeout_s:g}, but scoring a sample is cut off at "
            f"reward_model.timeout_s={deadline_s:g}, which counts as an error; set reward_model.timeout_s to "
            f"{timeout_s + _START_AND_END_S:g} or more, or timeout_s (of the data source in "
            "reward_model.reward_kwargs.scorer_kwargs, of a part in its kwargs, of `strop score` in --option "
            "timeout_s=SECONDS) to a second less than it"
        )
    require_bubblewrap()
    require_sandbox()


def compute_score(
    solution_str: str,
    ground_truth: str | Mapping[str, Any],
    *,
    response_prefix: str = "",
    score: float = 1.0,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = 512,
) -> float:
    """Return ``score`` if the program in the response passes every test, else 0.

    The program is the result of ``extract_program``, after ``prefix``. ``response_prefix`` is what the prompt
    wrote of the response. The ground truth is a JSON object with ``kind``, ``tests``, and optionally
    ``prefix`` and ``entry_point``:

    * ``assert``: ``tests`` is a list of Python sources, run in order in one namespace;
    * ``stdin``: ``tests`` is a list of ``{"input": text, "output": text}``.

    All tests together have ``timeout_s`` seconds.

    Raises:
        ConfigError: bubblewrap is not installed.
        RewardError: no sandbox can be started.
        ValueError: another ground truth.
    """
    require_bubblewrap()
    limits = Limits(wall_s=timeout_s, memory_mb=memory_mb)
    if not solution_str.strip():
        return 0.0
    verdict = judge(solution_str, ground_truth, limits=limits, response_prefix=response_prefix)
    return score if verdict.passed else 0.0


def judge(
    solution_str: str, ground_truth: str | Mapping[str, Any], *, limits: Limits, response_prefix: str = ""
) -> Verdict:
    """Return whether the response passes, with the reason if it does not."""
    truth = _read_truth(ground_truth)
    prefix = truth.get("prefix") or ""
    entry_point = truth.get("entry_point") or ""
    response = with_opening_fence(response_prefix, solution_str)
    program = extract_program(response, entry_point=entry_point, completes=bool(prefix))
    program = with_prefix(prefix, program)
    tests = truth["tests"]
    if truth["kind"] == "stdin":
        inputs, outputs = ([test[name] for test in tests] for name in ("input", "output"))
        return run_stdin_tests(program, inputs, outputs, limits=limits)
    return run_assert_tests(
        program,
        tests,
        entry_point=entry_point,
        prefix=prefix,
        limits=limits,
    )


def extract_program(response: str, *, entry_point: str = "", completes: bool = False) -> str:
    """Return a fenced block of the response, else the whole response.

    Blocks after the last ``</think>`` have precedence, then those marked as Python: an unmarked one after
    them is usually output of the program. Of several, the last one that defines ``entry_point``, because
    examples of its use may follow, else the last one. ``completes``: it may be the body of a function.
    """
    programs: list[str] = []
    completed = entry_point if completes else ""
    for text in (response.rpartition("</think>")[2], response):
        found = [(block["language"].lower(), _content(block, completed)) for block in _FENCED.finditer(text)]
        labelled = [content for language, content in found if language in _PYTHON]
        unlabelled = [content for language, content in found if not language]
        programs = programs or labelled or unlabelled
    defining = [program for program in programs if entry_point and _defines(program, entry_point)]
    return (defining or programs or [response])[-1]


def with_opening_fence(response_prefix: str, response: str) -> str:
    """Prepend the block that the prompt opens, and close it, unless the response opens one itself."""
    opening = _FENCE_LINE.search(_FENCED.sub("", response_prefix))
    if opening is None:
        return response
    first = _FENCE_LINE.search(response)
    if first and (first["words"].strip() or not response[: first.start()].strip()):
        return response
    text = opening.string[opening.start() :] + response
    return text if _FENCED.match(text) else f"{text}\n{opening['fence']}"


def _content(block: re.Match[str], completed: str) -> str:
    """Return the lines of a block without the indent of its fence; what they have beyond it is Python's.

    ``completed`` is the function of which the block may be the body, whose indent then is Python's, too.
    """
    program = re.sub(rf"^[ \t]{{0,{len(block['indent'])}}}", "", block["content"], flags=re.MULTILINE)
    return block["content"] if completed and not _defines(program, completed) else program


def _defines(program: str, name: str) -> bool:
    name = re.escape(name)
    definition = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*=(?!=)"
    return re.search(definition, program, re.MULTILINE) is not None


def with_prefix(prefix: str, program: str) -> str:
    """Put the prompt's code, which the program completes or repeats, before the program."""
    return prefix + ("\n" if prefix and not prefix.endswith("\n") else "") + program


def _read_truth(ground_truth: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ground truth as a mapping with valid tests. Raises ``ValueError`` otherwise."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    kinds = {"assert": _is_text, "stdin": _is_input_and_output}
    if not isinstance(truth, Mapping) or truth.get("kind") not in kinds:
        raise ValueError(f'the ground truth {str(truth)[:80]!r} has no "kind": expected "assert" or "stdin"')
    tests = truth.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(kinds[truth["kind"]], tests)):
        raise ValueError(
            f"the ground truth has tests={str(tests)[:80]!r}: expected a list of Python sources for assert, "
            'of {"input": text, "output": text} for stdin'
        )
    return truth


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_input_and_output(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(value.get(name)) for name in ("input", "output"))

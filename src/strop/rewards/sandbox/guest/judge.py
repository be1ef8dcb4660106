"""The tests of one program, run where it cannot reach; what they call is asked of its own sandbox."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types
from typing import Any

from .begin import read_job, take_over_streams
from .channel import Channel, Closed
from .remote import Peer


def main(job_descriptor: int) -> None:
    """Run the tests of the job; the verdict is written to the descriptor that the job names."""
    job = read_job(job_descriptor)
    answers, requests = take_over_streams()
    channel = Channel(answers, requests, job["limits"]["output_bytes"])
    try:
        verdict = _judge(job, channel)
    except Closed:
        verdict = {"status": "failed", "reason": "the program ended before the tests did"}
    # Tests are data, and whatever they raise means that the program has not passed them.
    except BaseException as error:  # noqa: BLE001
        verdict = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]}
    os.write(job["verdict"], json.dumps(verdict).encode())
    os._exit(0)


def _judge(job: dict[str, Any], channel: Channel) -> dict[str, str]:
    try:
        if channel.receive() != "hello":
            return {"status": "not started"}
    except Closed:
        return {"status": "not started"}
    state = channel.receive()
    if "names" not in state:
        name, text = state["raised"]
        return {"status": "failed", "reason": f"the program raised {name}: {text}"}
    run_tests(job, Peer(channel), {name for name in state["names"] if type(name) is str})
    return {"status": "passed"}


def run_tests(job: dict[str, Any], peer: Peer, offered: set[str]) -> None:
    """Raise unless every test passes.

    Names in the tests mean, in this order: what the tests and the prefix of the job define, Python's own
    names and modules, and only then what the program defines. The function under test is the program's.
    """
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    names = module.__dict__
    _run_prefix(job["prefix"], names)
    codes = [compile(test, f"<test {number}>", "exec") for number, test in enumerate(job["tests"], 1)]
    for name in set().union(*map(_names, codes)) - set(names) - set(vars(builtins)):
        if name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        elif name in offered:
            names[name] = peer.name(name)
    if entry_point := job["entry_point"]:
        names[entry_point] = peer.name(entry_point)
    for code, test in zip(codes, job["tests"], strict=True):
        exec(code, names)
        if entry_point and _leaves_check_uncalled(test):
            names["check"](names[entry_point])


def _run_prefix(prefix: str, names: dict[str, Any]) -> None:
    """Functions that the prompt defines before the one to be written, and its imports."""
    try:
        code = compile(prefix, "<prefix>", "exec")
    except SyntaxError:  # a prompt may end in the middle of a function
        return
    exec(code, names)


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _leaves_check_uncalled(test: str) -> bool:
    """Whether it defines ``check(candidate)``, as HumanEval's tests do, and leaves the call to the reader."""
    body = ast.parse(test).body
    defined = any(isinstance(line, ast.FunctionDef) and line.name == "check" for line in body)
    calls = [
        line.value.func for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
    ]
    return defined and not any(isinstance(called, ast.Name) and called.id == "check" for called in calls)

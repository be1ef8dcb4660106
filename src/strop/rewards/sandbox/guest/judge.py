"""The judge: run the tests of a program in a sandbox that it cannot reach.

Functions of the program are called in the program's sandbox, through the stand-ins ``Peer`` and ``Remote``.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from .channel import Channel, Closed, decode, encode, leave_streams, read_job


class RemoteError(Exception):
    """An exception class that the program defines."""


class Peer:
    """The program's sandbox, as the judge sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def name(self, name: str) -> Any:
        """Look up ``name`` in the program: a value or a stand-in. Raises as ``ask`` does."""
        return self.ask(0, "get", [name])

    def ask(self, number: int, action: str, arguments: Any) -> Any:
        """Perform an action on an object of the program; return a value or a stand-in.

        Raises the built-in exception that the program raised (see ``_class_of``), ``RemoteError`` for others,
        or ``Closed``.
        """
        encoded = encode(arguments, _number_of)
        self._channel.send({"object": number, "action": action, "arguments": encoded})
        answer = self._channel.receive()
        try:
            if "raised" not in answer:
                return decode(answer["value"], self._stand_in)
            name, text = answer["raised"]
        except Exception as error:  # the program wrote into its pipe: treat it as ended
            raise self._channel.closed() from error
        raise _class_of(name)(f"{name}: {text}")

    def _stand_in(self, number: Any) -> Remote:
        if type(number) is not int:
            raise ValueError("a reference that is not a number")
        return Remote(self, number)


def _class_of(name: Any) -> type[Exception]:
    """Return the class to raise in the judge for a program's exception of this name.

    ``StopIteration`` becomes ``RuntimeError``, as within a generator (PEP 479): raised by a function that
    ``map`` calls it would only end the loop, and ``assert all(map(f, cases))`` would hold.
    """
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return RemoteError
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return RuntimeError
    # Their constructors take more than a text.
    return RemoteError if issubclass(kind, UnicodeError | BaseExceptionGroup) else kind


class Remote:
    """Stand-in for an object of the program: tests can call it, read its attributes and iterate over it.

    Comparing it raises: the program would decide the result. Tests must compare plain values.
    """

    __slots__ = ("_strop_items", "_strop_number", "_strop_peer", "_strop_taken")
    __hash__ = None

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_strop_peer", peer)
        object.__setattr__(self, "_strop_number", number)
        object.__setattr__(self, "_strop_items", deque())
        object.__setattr__(self, "_strop_taken", 0)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._strop_peer.ask(self._strop_number, "call", [arguments, named])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._strop_peer.ask(self._strop_number, "get", [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._strop_peer.ask(self._strop_number, "set", [name, value])

    def __iter__(self) -> Iterator[Any]:
        found = self._strop_peer.ask(self._strop_number, "iter", [])
        if found is None:  # an iterator itself
            return self
        return found if type(found) is Remote else iter(found)

    def __next__(self) -> Any:
        """Take the next item; read one sixteenth of what was taken ahead, as an exchange takes 0.1 ms."""
        items = self._strop_items
        if not items:
            items += self._strop_peer.ask(self._strop_number, "take", [1 + self._strop_taken // 16])
            object.__setattr__(self, "_strop_taken", self._strop_taken + len(items))
        if not items:
            raise StopIteration
        return items.popleft()

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("the program returned an object that is not a plain value; it cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse  # type: ignore[assignment]


def _number_of(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(f"a test passes a {type(value).__name__} to the program; only plain values can cross")
    return value._strop_number


def main(job_descriptor: int) -> None:
    """Run the tests of the job, and write two lines to its descriptor: that this has started; the verdict."""
    job = read_job(job_descriptor)
    leave_streams()
    os.write(job["verdict"], b"started\n")
    channel = Channel(job["answers"], job["questions"], job["limits"]["output_bytes"])
    try:
        verdict = _judge(job, channel)
    # Tests may raise anything; it means that the program has failed.
    except BaseException as error:  # noqa: BLE001
        verdict = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:1000]}
    if channel.is_closed and verdict["status"] != "not started":  # tests may ignore the exception
        verdict = {"status": "failed", "reason": "the program ended before the tests did"}
    os.write(job["verdict"], json.dumps(verdict).encode())
    os._exit(0)


def _judge(job: dict[str, Any], channel: Channel) -> dict[str, str]:
    try:
        if channel.receive() != "hello":
            return {"status": "not started"}
    except Closed:
        return {"status": "not started"}
    channel.send("run")  # the program starts only now: an earlier failure is not its fault
    state = channel.receive()
    if "names" not in state:
        name, text = state["raised"]
        return {"status": "failed", "reason": f"the program raised {name}: {text}"}
    run_tests(job, Peer(channel), {name for name in state["names"] if type(name) is str})
    return {"status": "passed"}


def run_tests(job: dict[str, Any], peer: Peer, offered: set[str]) -> None:
    """Raise unless every test passes.

    Names in the tests resolve, in this order, to definitions of the tests and the prefix, to Python's
    built-in names and modules, and only then to the program's. The function under test is always the
    program's.
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
    """Run the prompt's imports and the functions that it defines before the requested one."""
    try:
        code = compile(prefix, "<prefix>", "exec")
    except SyntaxError:  # the prompt may end inside a function
        return
    exec(code, names)


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _leaves_check_uncalled(test: str) -> bool:
    """Return True if the test defines ``check(candidate)``, as HumanEval's do, and does not call it."""
    body = ast.parse(test).body
    defined = any(isinstance(line, ast.FunctionDef) and line.name == "check" for line in body)
    calls = [
        line.value.func for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
    ]
    return defined and not any(isinstance(called, ast.Name) and called.id == "check" for called in calls)

"""Identity of a function that a program passes as a reward, between two runs: what it computes with.

A reward in a file is identified by the digest of that file (:mod:`strop.checkpoint.record`).
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of what a function computes with, equal in every start of one Python version.

    Of its byte code, constants, defaults, and what it closes over; of the globals that it names; of the
    functions and classes among these in the same way. Modules among them count by their file, those that it
    imports itself by their name. Values count if they are of built-in types, arrays, dates, paths, patterns,
    or objects of the user's classes, which have the state that pickle sees; others by their class. A comment,
    or the place of the code in its file, does not count.

    A digest of the cloudpickle differs between processes for functions that hold a set, and for classes.
    """
    text = _Description().of(function)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


_PLAIN = (str, int, float, complex, bool, bytes, types.NoneType, types.EllipsisType)
_PICKLED = "builtins", "datetime", "decimal", "enum", "fractions", "functools", "pathlib", "re", "zoneinfo"
"""Modules of the standard library whose objects are described by the state that pickle sees."""
_IMMUTABLE = (tuple, frozenset, types.CodeType)
"""Whether two equal ones are one object depends on how their module was compiled."""


class _Description:
    """Texts of values by their content; an object that was described before is named by its number."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # the object, too: its id must not be used again

    def of(self, value: Any) -> str:
        """Return the text of a value."""
        if type(value) in _PLAIN:
            return repr(value)
        if not isinstance(value, _IMMUTABLE):
            if id(value) in self._seen:
                return f"<{self._seen[id(value)][0]}>"
            self._seen[id(value)] = len(self._seen), value
        return f"{type(value).__qualname__}({self._content(value)})"

    def _all(self, *values: Any) -> str:
        return ", ".join(map(self.of, values))

    def _beside(self) -> _Description:
        """Return a description of a value whose place is not known yet; it may name those around it."""
        other = _Description()
        other._seen = dict(self._seen)
        return other

    def _content(self, value: Any) -> str:
        match value:
            case list() | tuple():
                return self._all(*value)
            case set() | frozenset():  # their order is another one in every interpreter
                return ", ".join(sorted(self._beside().of(item) for item in value))
            case dict():
                keys = {self._beside().of(key): key for key in value}
                return ", ".join(f"{text}: {self.of(value[keys[text]])}" for text in sorted(keys))
            case types.CodeType():
                counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
                names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
                return self._all(value.co_code, counts, names, value.co_consts)
            case types.ModuleType():
                file = value.__dict__.get("__file__") if _is_own(value.__name__) else None
                return self._all(value.__name__, Path(file).read_bytes() if file else None)
            case types.FunctionType() | type() if not _is_own(value.__module__):
                return f"{value.__module__}.{value.__qualname__}"
            case types.FunctionType():
                return self._function(value)
            case type():
                return self._class(value)
            case staticmethod() | classmethod():
                return self.of(value.__func__)
            case property():
                return self._all(value.fget, value.fset)
        return self._object(value)

    def _function(self, function: types.FunctionType) -> str:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        known = function.__globals__
        used = {name: known[name] for name in _globals_of(function.__code__) if name in known}
        defaults = function.__defaults__, function.__kwdefaults__
        return self._all(function.__code__, defaults, cells, vars(function), used)

    def _class(self, one: type) -> str:
        own = {  # what Python and libraries add to a class may have another order, or addresses
            name: item
            for name, item in vars(one).items()
            if not name.startswith("__") or isinstance(item, types.FunctionType)
        }
        return self._all(one.__qualname__, one.__bases__, own)

    def _object(self, value: Any) -> str:
        if hasattr(type(value), "__array__"):
            import numpy as np

            try:
                array = np.asarray(value)
                content = array.tolist() if array.dtype.hasobject else array.tobytes()
            except Exception:  # noqa: BLE001 - on another device, with gradients, or of a class that raises
                return ""
            return self._all(str(array.dtype), array.shape, content)
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:  # functools.cache
            return self.of(wrapped)
        module = type(value).__module__
        if module.partition(".")[0] not in _PICKLED and not _is_own(module):
            return ""
        try:
            reduce = copyreg.dispatch_table.get(type(value))  # patterns
            state = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # noqa: BLE001 - a user's method, or an object that has no copies
            state = None
        return self._all(type(value), state)


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code and the code in it load."""
    loaded = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    }
    return loaded.union(*(_globals_of(item) for item in code.co_consts if isinstance(item, types.CodeType)))


def _is_own(module: str | None) -> bool:
    """Return True for a module that is neither installed, built in, nor strop's."""
    if module == "__main__":
        return True
    top = (module or "").partition(".")[0]
    loaded = sys.modules.get(module or "") or sys.modules.get(top)
    file = getattr(loaded, "__file__", None)
    if file is None or top == "strop" or top in sys.stdlib_module_names:
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a name that is assigned later
        return False

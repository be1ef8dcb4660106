"""Identity of a reward between two runs: the user's modules that it imports, or a function's code.

Installed packages, the standard library and strop itself count by their names alone.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import importlib
import importlib.util
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import Any

from strop.config.names import REWARD_MANAGERS
from strop.config.paths import expand, is_function
from strop.config.reward_parts import SCORERS
from strop.config.schema import Config
from strop.rewards.custom import KEY, search_path


def modules_of(config: Config) -> dict[str, dict[str, Path]]:
    """Return the user's modules that a run's rewards import: configuration key -> module -> its file.

    They are found by ``import`` statements, also those in functions; nothing is imported. The file of
    ``custom_reward_function.path`` itself is not among them.
    """
    section, custom = config.reward_model, config.custom_reward_function.path
    folders, found = list(sys.path), {}
    if custom is not None and Path(expand(custom)).is_file():
        file = Path(expand(custom)).absolute()
        folders = search_path(file.parent)
        found[f"{KEY}.path"] = _imported(file, "")
    scorers = [part.get("scorer") for part in section.parts.values() if isinstance(part, Mapping)]
    known = (None, *SCORERS)
    found["reward_model.parts"] = [_module(scorer) for scorer in scorers if scorer not in known]
    if section.reward_manager not in REWARD_MANAGERS:
        found["reward_model.reward_manager"] = [_module(section.reward_manager)]
    return {key: files for key, names in found.items() if (files := files_of(names, folders))}


def _module(name: Any) -> str:
    """Return the module of an import path; "" for a function that a program passes."""
    if not isinstance(name, str) or is_function(name):
        return ""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def files_of(names: Iterable[str], folders: Sequence[str]) -> dict[str, Path]:
    """Return the files of modules, and of all that they import, by module; only the user's own.

    ``folders`` are searched as ``sys.path`` is. Names that are no modules are left out.
    """
    importlib.invalidate_caches()
    found: dict[str, Path] = {}
    known, waiting = set(), list(names)
    while waiting:
        words = waiting.pop().split(".")
        for end in range(1, len(words) + 1):
            name = ".".join(words[:end])
            if not words[0] or name in known:
                continue
            known.add(name)
            spec = _find(name, folders)
            if spec is None or spec.origin is None or not Path(spec.origin).is_file():
                continue  # also a package without a file
            if not _is_installed(name, spec.origin):
                found[name] = Path(spec.origin)
                is_package = spec.submodule_search_locations is not None
                waiting += _imported(found[name], name if is_package else name.rpartition(".")[0])
    return found


def _find(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return where a module is, or None; the packages that hold it are not imported."""
    above, _, _ = name.rpartition(".")
    try:
        if above:
            package = _find(above, folders)
            inside = package.submodule_search_locations if package is not None else None
            return PathFinder.find_spec(name, inside) if inside else None
        # The import hooks of editable installs know packages that no path has.
        return PathFinder.find_spec(name, folders) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _imported(file: Path, package: str) -> list[str]:
    """Return the modules that a file's ``import`` statements may name; ``package`` is the one it is in."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a compiled module, or an error that loading it reports
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(
        Path(path).resolve() for path in {*paths, *site.getsitepackages(), site.getusersitepackages()}
    )


def _is_installed(module: str, file: str) -> bool:
    top = module.partition(".")[0]
    if top == "strop" or top in sys.stdlib_module_names:
        return True
    return any(
        folder in _installed_folders() or _is_target(folder) for folder in Path(file).resolve().parents
    )


@functools.cache
def _is_target(folder: Path) -> bool:
    """Return True for a folder on PYTHONPATH that pip installed packages into (``--target``)."""
    return any(folder.glob("*.dist-info"))


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a digest of what a function computes with, equal in every start of one Python version.

    Of its byte code, constants, defaults, and what it closes over; of the globals that it names; of the
    functions and classes among these in the same way, and of the files of modules. Values count if they are
    of built-in types, arrays, dates, paths, patterns, or objects of the user's classes, which have the state
    that pickle sees; others by their class. A comment, or the place of the code in its file, does not count.
    """
    text = _Description().of(function)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


_PLAIN = (str, int, float, complex, bool, bytes, types.NoneType, types.EllipsisType)
_BY_TEXT = (*_PLAIN, PurePath, decimal.Decimal, fractions.Fraction, range, slice, bytearray)
_TIMES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
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

    def _content(self, value: Any) -> str:
        match value:
            case list() | tuple():
                return self._all(*value)
            case set() | frozenset():  # their order is another one in every interpreter
                return ", ".join(sorted(_Description().of(item) for item in value))
            case dict():
                keys = {_Description().of(key): key for key in value}
                return ", ".join(f"{text}: {self.of(value[keys[text]])}" for text in sorted(keys))
            case types.CodeType():
                counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
                names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
                return self._all(value.co_code, counts, names, value.co_consts)
            case types.ModuleType():
                return _contents(files_of([value.__name__], sys.path))
            case types.FunctionType():
                return self._function(value) if _is_own(value) else _name(value)
            case type():
                return self._class(value) if _is_own(value) else _name(value)
            case types.BuiltinFunctionType():
                owner = value.__self__
                return _name(value) if isinstance(owner, types.ModuleType) else self._all(_name(value), owner)
            case types.MethodType():
                return self._all(value.__func__, value.__self__)
            case staticmethod() | classmethod():
                return self.of(value.__func__)
            case property():
                return self._all(value.fget, value.fset)
            case functools.partial():
                return self._all(value.func, value.args, value.keywords)
            case re.Pattern():
                return self._all(value.pattern, value.flags)
            case enum.Enum():
                return self._all(type(value), value.name, value.value)
        return repr(value) if isinstance(value, _BY_TEXT + _TIMES) else self._object(value)

    def _function(self, function: types.FunctionType) -> str:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        loaded, imported = _names_of(function.__code__)
        known, package = function.__globals__, function.__globals__.get("__package__")
        names = [*imported, *(f"{package}.{name}" for name in imported if package)]
        used = {name: known[name] for name in loaded if name in known}
        defaults = function.__defaults__, function.__kwdefaults__
        held = self._all(function.__code__, defaults, cells, vars(function), used)
        return f"{held}, {_contents(files_of(names, sys.path))}"

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
        if not _is_own(type(value)):
            return ""
        try:
            state = value.__getstate__()
        except Exception:  # noqa: BLE001 - a user's method
            state = None
        return self._all(type(value), state)


def _names_of(code: types.CodeType) -> tuple[set[str], list[str]]:
    """Return the globals that code and the code in it load, and the modules that it imports."""
    loaded, imported, base = set[str](), list[str](), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            loaded.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            base = instruction.argval
            imported.append(base)
        elif instruction.opname == "IMPORT_FROM":  # may be a module
            imported.append(f"{base}.{instruction.argval}".lstrip("."))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_of(constant)
            loaded |= inner[0]
            imported += inner[1]
    return loaded, imported


def _contents(files: Mapping[str, Path]) -> str:
    return ", ".join(
        f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}" for name in sorted(files)
    )


def _is_own(value: Any) -> bool:
    """Return True for a function or class that is neither installed, built in, nor strop's."""
    module = value.__module__ or ""
    loaded = sys.modules.get(module) or sys.modules.get(module.partition(".")[0])
    return module == "__main__" or not _is_installed(module, getattr(loaded, "__file__", None) or "")


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a name that is assigned later
        return False

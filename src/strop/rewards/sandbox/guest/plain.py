"""Plain values as JSON, and back: what crosses from a program to its judge.

Only values of built-in types come out of ``decode``, whatever wrote the message, so that ``==`` between them
means what it says. A value of any other type stays where it is and crosses as a reference. Values of classes
that derive from built-in ones cross as what they are built on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SAFE_INTEGER = 1 << 53
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict)}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """JSON for ``value``; ``refer`` gives the number of an object that is no plain value.

    The methods of the built-in types are called directly: a class of the program's own may override them.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        exact = int.__add__(value, 0)
        return exact if -_SAFE_INTEGER < exact < _SAFE_INTEGER else {"int": hex(exact)}
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in dict.items(value)]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in kind.__iter__(value)]}
    if type(value) is range:
        return {"range": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    if type(value) in (Decimal, Fraction):
        return {type(value).__name__: str(value)}
    for name, kind in _TYPES.items():
        if value is kind:
            return {"type": name}
    return {"object": refer(value)}


def decode(message: Any, find: Callable[[int], Any]) -> Any:
    """The value of a message; ``find`` gives what stands for the object of a number.

    Raises ``ValueError`` (or ``TypeError``) for a message that ``encode`` does not write.
    """
    if message is None or type(message) in (bool, int, str):
        return message
    if type(message) is not dict or len(message) != 1:
        raise ValueError("a message that is no value")
    ((name, content),) = message.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in content)
    match name:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(key, find): decode(item, find) for key, item in content}
        case "range":
            return range(*(decode(part, find) for part in content))
        case "Decimal":
            return Decimal(content)
        case "Fraction":
            return Fraction(content)
        case "type" if content in _TYPES:
            return _TYPES[content]
        case "object":
            return find(content)
    raise ValueError("a message of an unknown kind")

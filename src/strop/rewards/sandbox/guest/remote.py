"""Stand-ins, in the judge's sandbox, for what is in the program's."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any, NoReturn

from .channel import Channel, Closed
from .plain import decode, encode


class RemoteError(Exception):
    """An exception of the program's own kind."""


class Peer:
    """The program's sandbox, as the judge sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def name(self, name: str) -> Any:
        """What the program calls ``name``: a value, or a stand-in. Raises what the program raises for it."""
        return self.ask(0, "get", [name])

    def ask(self, number: int, action: str, arguments: Any) -> Any:
        """What the program answers, as a value or a stand-in.

        Raises the built-in exception that the program raised, ``RemoteError`` for another one; ``Closed``.
        """
        encoded = encode(arguments, _number_of)
        self._channel.send({"object": number, "action": action, "arguments": encoded})
        answer = self._channel.receive()
        try:
            if "raised" not in answer:
                return decode(answer["value"], self._stand_in)
            name, text = answer["raised"]
        except Exception as error:  # the program wrote into its pipe: it is as good as gone
            raise Closed from error
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if is_error and not issubclass(kind, UnicodeError) else RemoteError)(f"{name}: {text}")

    def _stand_in(self, number: Any) -> Remote:
        if type(number) is not int:
            raise ValueError("a reference that is no number")
        return Remote(self, number)


class Remote:
    """An object of the program: it can be called, asked for attributes and iterated over, and equals nothing.

    A comparison would be the program's own, and so is refused: tests have to look at plain values.
    """

    __slots__ = ("_strop_number", "_strop_peer")
    __hash__ = None

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_strop_peer", peer)
        object.__setattr__(self, "_strop_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._strop_peer.ask(self._strop_number, "call", [arguments, named])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._strop_peer.ask(self._strop_number, "get", [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._strop_peer.ask(self._strop_number, "set", [name, value])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._strop_peer.ask(self._strop_number, "items", []))

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("the program returned an object that is no plain value; it cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse  # type: ignore[assignment]


def _number_of(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(f"a test hands over a {type(value).__name__}; only plain values can cross")
    return value._strop_number

from __future__ import annotations

import collections
import enum
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rewards.sandbox.guest.channel import decode, encode


def no_object(value: object) -> int:
    raise AssertionError("a plain value crossed as a reference")


def crossed(value: object) -> object:
    return decode(encode(value, no_object), no_object)


keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
plain_values = st.recursive(
    keys | st.complex_numbers(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.dictionaries(keys, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(plain_values)
def test_plain_values_cross_unchanged(value: object):
    assert crossed(value) == value
    assert type(crossed(value)) is type(value)


def test_properties_that_equality_does_not_show_cross_too():
    assert math.isnan(crossed(math.nan))
    assert math.copysign(1, crossed(-0.0)) == -1
    assert type(crossed(1.0)) is float
    assert crossed([int, str]) == [int, str]
    assert crossed(10**5000) == 10**5000
    assert crossed("\udc80") == "\udc80"
    assert list(crossed({2: 0, 1: 0})) == [2, 1]
    assert crossed(range(3, 9, 2)) == range(3, 9, 2)
    assert crossed(collections.deque([1, 2])) == collections.deque([1, 2])


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __int__(self) -> int:
        return 42

    def __index__(self) -> int:
        return 42

    def __add__(self, other: int) -> int:
        return 42

    __hash__ = int.__hash__


class LiarList(list):
    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self):
        return iter([42])

    __hash__ = None


def test_classes_built_on_plain_ones_cross_as_what_they_are_built_on():
    assert type(crossed(Liar(7))) is int
    assert crossed(Liar(7)) == 7
    assert crossed(LiarList([1, 2])) == [1, 2]
    assert crossed(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert crossed(enum.IntEnum("Colour", "red")["red"]) == 1
    assert type(crossed(collections.namedtuple("Point", "x y")(1, 2))) is tuple


def test_other_objects_cross_as_references():
    value = object()
    assert encode([value], lambda found: 5 if found is value else 0) == {"list": [{"object": 5}]}
    assert decode({"object": 5}, lambda number: number * 2) == 10


@pytest.mark.parametrize(
    "message",
    [[1], {}, {"list": [1], "tuple": [1]}, {"eval": "1"}, {"list": 1}, {"dict": [[1]]}, {"float": "x"}, 1.5],
)
def test_messages_that_encode_does_not_make_are_refused(message: object):
    with pytest.raises((ValueError, TypeError)):
        decode(message, no_object)

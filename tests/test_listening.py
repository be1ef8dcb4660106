"""The address of a server: which port it gets, and which requests it answers."""

from __future__ import annotations

import socket

import pytest

from strop.errors import ConfigError
from strop.listening import LOOPBACK, Address, bearer, is_token


def test_a_taken_port_is_an_error_unless_it_was_only_the_usual_one():
    taken = Address(LOOPBACK, 0)
    with pytest.raises(ConfigError, match=rf"host {LOOPBACK}, port {taken.port}: .*in use"):
        Address(LOOPBACK, taken.port)
    other = Address(LOOPBACK, None, usual=taken.port)
    assert other.port not in (0, taken.port)
    with socket.create_connection((LOOPBACK, other.port), timeout=10):
        pass


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), (LOOPBACK, 1 << 16), ("a..b", 0)])
def test_an_address_that_cannot_be_is_named(host, port):
    with pytest.raises(ConfigError, match=host):
        Address(host, port)


def test_an_address_of_ipv6_has_brackets():
    assert Address("::1", 0).url.startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer right", "right"), ("right", ""), ("Basic right", ""), ("", ""), ("Bearer ", "")],
)
def test_a_token_stands_behind_bearer(header, token):
    assert bearer(header) == token


def test_the_token_decides_and_without_one_the_name():
    guarded, free = Address(LOOPBACK, 0, "right"), Address(LOOPBACK, 0)
    found = [guarded.refusal("evil.example", given) for given in (["wrong", "right"], ["\xe9"], [""], [])]
    assert [refused and refused[0] for refused in found] == [None, 401, 401, 401]
    found = [free.refusal(name, []) for name in ("localhost:1", "127.0.0.1", "[::1]:80", "evil.example", "[")]
    assert [refused and refused[0] for refused in found] == [None, None, None, 403, 403]


@pytest.mark.parametrize(
    ("given", "token", "is_right"),
    [("secret", "secret\n", True), ("wrong", "secret\n", False), ("", "", False), ("", "\n", False)],
)
def test_a_token_of_a_file_counts_without_its_new_line(given, token, is_right):
    assert is_token(given, token) is is_right  # as clients send it: see Connection

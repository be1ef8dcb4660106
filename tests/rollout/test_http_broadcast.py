"""Weights by broadcast to fake servers: one that dies, falls silent, gets others than were sent, or joins."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
import torch

from strop.controller.rendezvous import open_store
from strop.errors import ModelError
from strop.listening import LOOPBACK, address_toward
from strop.rollout.http import pool
from strop.rollout.transfer import broadcast
from strop.rollout.transfer.broadcast import Channel, received_file, send_file
from strop.rollout.weights import checksums

import forked
from fake_vllm import FakeVLLM
from http_rollouts import counts, rollout_on
from messages import naming
from tiny_lms import tiny_lm


@pytest.fixture(autouse=True)
def many_parts(monkeypatch):
    monkeypatch.setattr(broadcast, "PART_BYTES", 10_000)
    monkeypatch.setattr(pool, "_PROBE_S", 0.1)


def update(rollout, seed):
    """Bring a rollout other weights; return their checksums."""
    model = tiny_lm("qwen2", seed)
    rollout.update_weights(model.named_parameters())
    return checksums(model.named_parameters(), torch.float32)


def await_servers(rollout, number):
    deadline = time.monotonic() + 60
    while len(rollout._pool.live) < number:
        assert time.monotonic() < deadline, rollout._pool.out
        time.sleep(0.05)


def sending():
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


def test_servers_get_the_weights_whichever_network_they_are_in(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as a run that is alone on this machine sets it
    servers = [FakeVLLM(), FakeVLLM(host=address_toward("10.255.255.255"))]
    rollout = rollout_on(*servers, broadcasts=True, open_network=True)
    counts(rollout)
    for seed in (1, 2):
        expected = update(rollout, seed)
        assert [server.checksums for server in servers] == [expected, expected]
    senders = [server.bodies("/update_weights")[-1]["update_info"]["sender"] for server in servers]
    assert [sender["address"] for sender in senders] == [LOOPBACK, servers[1].host]
    size = os.stat(rollout._pool.sealed.path).st_size
    assert counts(rollout)["weights/bytes"] == 2 * 2 * size
    assert not sending()


def receive_a_part(told, number):
    """Send this process a signal in the middle of a transfer from the sender that the file ``told`` names."""
    print("ready", flush=True)
    while not told.exists():
        time.sleep(0.01)
    sender = json.loads(told.read_text())
    where = sender["address"], sender["port"], 1, sender["size"]
    next(Channel.to_sender(*where, torch.device("cpu")).receive())
    os.kill(os.getpid(), number)


@pytest.mark.fast("9-100.0")
@pytest.mark.parametrize(("number", "patience_s"), [(signal.SIGKILL, 100.0), (signal.SIGSTOP, 4.0)])
def test_a_server_that_ends_amid_a_transfer_leaves_and_comes_back(tmp_path, number, patience_s):
    failing, other = FakeVLLM(), FakeVLLM()
    rollout = rollout_on(failing, other, broadcasts=True, patience_s=patience_s)
    has_left = threading.Event()
    with forked.start(receive_a_part, tmp_path / "sender", number) as child:
        while "ready" not in child.stdout:
            time.sleep(0.01)

        def fail(version, sender):
            (tmp_path / "new").write_text(json.dumps(sender))
            (tmp_path / "new").rename(tmp_path / "sender")
            while number == signal.SIGKILL and child.poll() is None:
                time.sleep(0.01)
            if number == signal.SIGSTOP:
                has_left.wait()
            failing.kill()

        loaded, failing.loaded = failing.loaded, fail
        begun = time.monotonic()
        expected = update(rollout, 1)
        assert other.checksums == expected
        assert [server.url for server in rollout._pool.live] == [other.url]
        assert "the transfer of" in str(rollout._pool.out[failing.url])
        assert child.poll() == (-number if number == signal.SIGKILL else None)
        while sending():
            assert time.monotonic() < begun + 30
            time.sleep(0.05)
        failing.loaded = loaded
        has_left.set()
    failing.start()
    await_servers(rollout, 2)
    assert failing.checksums == expected
    assert failing.checksums == update(rollout, 1)
    assert counts(rollout)["weights/joins"] == 1


def test_other_weights_than_were_sent_are_not_loaded(monkeypatch):
    servers = [FakeVLLM(), FakeVLLM()]
    rollout = rollout_on(*servers, broadcasts=True)
    receive, changed = Channel.receive, []

    def receive_and_change(channel):
        for name, part in receive(channel):
            if not changed:
                changed.append(name)
                part[-1] ^= 1
            yield name, part

    monkeypatch.setattr(Channel, "receive", receive_and_change)
    before, expected = servers[0].checksums, update(rollout, 1)
    (lost,) = (server for server in servers if server.url in rollout._pool.out)
    assert lost.checksums in (before, {})  # {}: it joins again meanwhile
    assert "has the checksum" in str(rollout._pool.out[lost.url])
    await_servers(rollout, 2)
    assert [server.checksums for server in servers] == [expected, expected]


def test_every_rank_of_a_server_gets_the_file_or_an_error(tmp_path):
    file, found = tmp_path / "file", {}
    file.write_bytes(os.urandom(123_456))

    def receive(rank):
        with received_file(sender, rank) as path, open(path, "rb") as received:
            found[rank] = received.read()

    sender = send_file(str(file), LOOPBACK, 2, 20.0)
    file.unlink()  # the next transfer has begun
    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(map(len, found.values())) == {123_456}
    assert found[0] == found[1]


def send_a_part(told):
    """Offer a file of two parts, and die once the first is on its way."""
    store, port = open_store(LOOPBACK)
    sender = {"address": LOOPBACK, "port": port, "size": 2, "patience_s": 100.0}
    (told.parent / "new").write_text(json.dumps(sender))
    (told.parent / "new").rename(told)

    def parts():
        yield "1", torch.zeros(1000, dtype=torch.uint8)
        yield "2", torch.zeros(1000, dtype=torch.uint8)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    Channel(store, 0, 2, torch.device("cpu")).send(parts(), 1000)


def test_a_server_does_not_wait_for_a_sender_that_died(tmp_path):
    with forked.start(send_a_part, tmp_path / "sender"):
        while not (tmp_path / "sender").exists():
            time.sleep(0.01)
        sender, begun = json.loads((tmp_path / "sender").read_text()), time.monotonic()
        with pytest.raises(RuntimeError), received_file(sender, 0):
            pass
        assert time.monotonic() < begun + 50


def test_a_wrong_checksum_is_named():
    store, port = open_store(LOOPBACK)
    sender = {"address": LOOPBACK, "port": port, "size": 2, "patience_s": 20.0}
    part = torch.arange(9, dtype=torch.uint8)

    def send():
        Channel(store, 0, 2, torch.device("cpu")).send([("7", part)])

    thread = threading.Thread(target=send)
    thread.start()
    # the trailer of gzip.compress(bytes(range(9)))
    with pytest.raises(ModelError, match=naming("3168879362", "expected 7")), received_file(sender, 0):
        pass
    thread.join()

"""Packed passes wait for nothing: the meta device has no numbers that a program could read back."""

from __future__ import annotations

from contextlib import nullcontext

import families
import pytest
import torch
from families import Groups

from strop.models.attention import WholeSequences
from strop.models.passes.micro_batch import MicroBatch

META = torch.device("meta")
SHARED: Groups = [(7, [6, 1, 5, 0]), (2, [3]), (5, [4, 4])]


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch):
    """Autocast does not know the meta device."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())


def on_meta(role):
    wrapper, head = families.ROLES[role]
    return wrapper(families.model("Qwen2", head), packed=True).to(META)


@pytest.mark.parametrize("groups", [SHARED, [(4, [0])]], ids=["samples", "nothing to learn from"])
@pytest.mark.parametrize("role", families.ROLES)
def test_a_packed_pass_and_its_gradient_read_nothing_from_the_device(role, groups):
    columns = families.samples(groups)
    outputs = on_meta(role)(MicroBatch.on(META, columns))
    expected = families.pair(role, "Qwen2")[0](columns)
    assert {name: out.shape for name, out in outputs.items()} == {
        name: out.shape for name, out in expected.items()
    }
    sum(out.sum() for out in outputs.values()).backward()


def test_columns_of_the_device_alone_are_copied_back():
    columns = {name: column.to(META) for name, column in families.samples(SHARED).items()}
    with pytest.raises(NotImplementedError, match=r"[Mm]eta"):
        on_meta("actor")(columns)


def test_the_layout_of_flash_attention_reads_nothing_from_the_device(monkeypatch):
    seen = []

    def by_lengths(self, query, key, value, window, scaling):
        seen.append(self._prompts.by_lengths)
        return query.transpose(1, 2)

    policy = on_meta("actor")
    monkeypatch.setattr("strop.models.attention.takes_lengths", lambda query, value: True)
    monkeypatch.setattr(WholeSequences, "_attend_by_lengths", by_lengths)
    policy(MicroBatch.on(META, families.samples(SHARED)))
    queries, keys, laid, *_ = seen[0]
    assert {queries.device, keys.device, laid.device} == {META}

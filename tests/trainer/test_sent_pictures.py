"""Pictures that groups hold: each is sent once, and dropped when no call needs it any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import picture_rows
import pytest
import torch

from strop import pictures
from strop.protocol import DataProto
from strop.trainer.sent_pictures import SentPictures


class Group:
    """Record the digests that it holds, and the calls."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.calls: list[tuple[str, set[int]]] = []
        self.hold_pictures = SimpleNamespace(start=lambda files: self.call("hold", set(files)))
        self.forget_pictures = SimpleNamespace(start=lambda digests: self.call("drop", set(digests)))

    def call(self, what: str, digests: set[int]) -> None:
        self.calls.append((what, digests))
        self.held = self.held | digests if what == "hold" else self.held - digests


@pytest.fixture(scope="module")
def digests() -> list[int]:
    return [pictures.hold(picture_rows.picture(seed)) for seed in range(4)]


def batch(*rows: list[int]) -> DataProto:
    return DataProto({"images": torch.tensor(rows)})


def test_a_picture_is_sent_once_and_dropped_with_the_last_batch_that_has_it(digests):
    a, b, c, d = digests
    groups = [Group(), Group()]
    sent = SentPictures([groups[0], None, groups[1], groups[0]])
    sent.send(batch([a, b], [a, 0]), 1)
    sent.send(batch([b, c]), 2)  # generated ahead
    sent.send(batch([a, b]), 1)  # learned from
    sent.send(batch([b, d]))  # a validation
    sent.drop(1)
    assert [group.held for group in groups] == [{b, c}] * 2
    sent.send(batch([d, 0]), 3)
    sent.drop(2)
    assert [group.held for group in groups] == [{d}] * 2
    expected: Any = [("hold", {a, b}), ("hold", {c}), ("hold", {d}), ("drop", {a, d})]
    expected += [("hold", {d}), ("drop", {b, c})]
    assert [group.calls for group in groups] == [expected] * 2


@pytest.mark.parametrize("lacking", [[], ["node-2"]])
def test_machines_that_do_not_see_the_files_get_their_content(tmp_path, lacking):
    (tmp_path / "a.ppm").write_bytes(content := picture_rows.picture(71 + 2 * len(lacking)))
    (tmp_path / "b.ppm").write_bytes(other := picture_rows.picture(72 + 2 * len(lacking)))
    digests = [pictures.hold_file(tmp_path / name) for name in ("a.ppm", "b.ppm")]
    asked, got = [], {}
    group = SimpleNamespace(
        hold_pictures=SimpleNamespace(start=got.update),
        nodes_without=lambda path: asked.append(path) or lacking,
    )
    sent = SentPictures([group])
    for number, digest in enumerate(digests):
        sent.send(batch([digest]), number)
    assert asked == [tmp_path / "a.ppm"]  # once
    found = [got[digest].file for digest in digests]
    assert found == ([content, other] if lacking else [tmp_path / "a.ppm", tmp_path / "b.ppm"])


def test_batches_of_text_send_nothing():
    sent = SentPictures([group := Group()])
    sent.send(DataProto({"input_ids": torch.zeros(2, 3)}), 1)
    sent.drop(1)
    assert group.calls == []

"""A tokenizer of characters, scorers that misbehave on request, and a look at what still runs."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rewards_support import none_within
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+=-#% abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One id a character; 0 is padding, 1 the end of the sequence."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: 2 + i for i, c in enumerate(CHARACTERS)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def run_response() -> Callable[..., Any]:
    """A scorer that runs the response as Python and returns what it assigned to ``result`` (else 1.0).

    Made in a function, so that it crosses to the process by value and the test module is not imported there.
    """

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        names: dict[str, Any] = {"ground_truth": ground_truth, "extra_info": extra_info}
        exec(solution_str, names)
        return names.get("result", 1.0)

    return score


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Lists the living processes started since; whatever a test left alive is a failure."""
    token = uuid.uuid4().hex
    monkeypatch.setenv("STROP_TEST_TOKEN", token)

    def look() -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if token.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    yield look
    assert none_within(look, 5.0), "processes were left behind"

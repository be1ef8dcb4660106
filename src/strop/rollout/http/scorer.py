"""``Scorer``: log-probs of given token ids by servers of a model that does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.models.folder import words_of
from strop.rollout.http.kind import token_of
from strop.rollout.http.pool import Pool, PoolThread
from strop.rollout.http.wire import FIRST_VERSION
from strop.rollout.vllm.arguments import vocabulary_digest


class Scorer:
    """Servers of one model, each with any number of rows at once."""

    def __init__(self, settings: Any, tokenizer: Any, longest: int) -> None:
        """Wait for the servers; ``ConfigError`` for one of another vocabulary or model, or for shorter rows.

        ``settings`` is a copy of the section ``rollout.http`` with their ``urls`` and ``token_env``,
        ``tokenizer`` that of the rows, and ``longest`` the number of ids of the longest row.
        """
        expected = {
            "logprobs_mode": "processed_logprobs",  # else vLLM may answer logits
            "max_model_len": longest + 1,  # it generates a token, too
            "unsupported": None,
            # added ones may differ, as with a teacher in the run's processes
            "ordinary_tokens": vocabulary_digest(tokenizer, added=False),
            "weight_version": FIRST_VERSION,  # else a run trains them
        }
        words, name = words_of(tokenizer), "teacher.servers"
        self._pool = Pool(settings, expected, words, token_of(settings), keeps_weights=True, name=name)
        self._thread = PoolThread(self._pool)

    def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the log-probs (float32) of the ids of each row but the first, each given those before it.

        Raises ``TrainingError`` for a server that answers anything else, as ``Pool.answer`` does.
        """
        found = self._thread.run(self._pool.score([list(row) for row in rows]))
        return [torch.tensor(scores, dtype=torch.float32) for scores in found]

    def close(self) -> None:
        """End the requests; the servers stay."""
        self._thread.close()

"""Workload of both systems, with planned response lengths. Imports the standard library only.

Uneven lengths are planned, not sampled: a random model stops at random, so two systems with different random
numbers would generate different lengths. Row r of iteration i ends at ``planned_lengths(i)[r]`` in both, by
hooks of negligible cost (``planned_ends``, ``trl_grpo.plan_ends``) that force the end token there and mask it
elsewhere. All other tokens are sampled from the model's logits. ``against_trl.py`` fails if lengths differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

WARM_UP = 1
"""Leading iterations that are not counted."""


@dataclass(frozen=True)
class Setting:
    """Workload of one comparison, passed to every process as a JSON file."""

    model: str
    """Key of ``rollout_hf.MODELS``, and name of the model folder."""
    algorithm: str
    """``grpo``, or ``ppo`` with a critic."""
    lengths: str
    """``uneven``: geometric, mean a quarter of the limit; ``limit``: every response has ``limit`` tokens."""
    limit: int
    """Maximum number of response tokens."""
    precision: str
    """``float32`` or ``bfloat16`` (autocast; the weights are float32 in both systems)."""
    inputs: str
    """Folder with the models and the prompts."""
    iterations: int = 3
    """Counted iterations, after ``WARM_UP`` others."""
    samples: int = 64
    """Samples per iteration, all in one optimizer step."""
    n: int = 8
    """Samples per prompt. TRL's PPO has no such option: its data set repeats each prompt ``n`` times."""
    kl_coef: float = 0.0
    """PPO: weight of the KL penalty in the reward. If 0, only TRL has a reference model."""
    rollout: str = "hf"
    """strop's rollout engine."""

    @property
    def name(self) -> str:
        """Unique one-line name."""
        more = "".join(
            f" {name}={getattr(self, name)}"
            for name in ("n", "kl_coef", "rollout")
            if getattr(self, name) != type(self).__dataclass_fields__[name].default
        )
        return f"{self.algorithm} {self.model} {self.lengths} {self.limit} {self.precision}{more}"

    @property
    def total_iterations(self) -> int:
        """Iterations including the warm-up."""
        return WARM_UP + self.iterations

    @property
    def prompt_count(self) -> int:
        """Number of prompts in the ``prompts`` file."""
        once = self.samples // self.n
        return once if self.algorithm == "ppo" else once * self.total_iterations

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder without a tokenizer."""
        return Path(self.inputs) / self.model

    @property
    def tokenizer_folder(self) -> Path:
        """Separate folder: next to a Qwen2 model, transformers would load it as Qwen2's tokenizer."""
        return Path(self.inputs) / f"{self.model}-tokenizer"

    @property
    def prompts(self) -> Path:
        """Parquet file of prompts. PPO repeats them in every iteration, because TRL shuffles them."""
        return Path(self.inputs) / f"{self.model}-{self.algorithm}-{self.n}.parquet"

    def planned_lengths(self, iteration: int) -> list[int] | None:
        """Return an iteration's response lengths with the end token; None if all are ``limit``."""
        if self.lengths == "limit":
            return None
        stream = random.Random(f"lengths of iteration {iteration}")
        miss = math.log(1 - 4 / self.limit)  # geometric distribution with mean limit / 4
        drawn = (1 + int(math.log(1 - stream.random()) / miss) for _ in range(self.samples))
        return [min(length, self.limit) for length in drawn]

    def write(self, path: Path) -> Path:
        """Write as JSON; return ``path``."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def read(cls, path: str | Path) -> Setting:
        """Read a file of ``write``."""
        return cls(**json.loads(Path(path).read_text()))

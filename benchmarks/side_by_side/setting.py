"""What both systems are asked to do, and how long their responses are. Imports the standard library only.

Uneven lengths are planned, not sampled: a random model stops at random, and two systems with different
random numbers would have other lengths. So row r of iteration i ends at ``planned_lengths(i)[r]`` in both, by
hooks that cost nothing beside the model (``planned_ends``, ``trl_grpo.plan_ends``): elsewhere the end token
cannot be drawn, at the planned place nothing else can. Tokens are sampled from the model's logits as always.
The driver compares the lengths that came back and fails when they differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

WARM_UP = 1
"""Iterations at the beginning that do not count."""


@dataclass(frozen=True)
class Setting:
    """One comparison; every process gets it as a JSON file."""

    model: str
    """Name of a size in ``inputs.MODELS``, and of the folder with the model."""
    algorithm: str
    """``grpo`` or ``ppo``, which has a critic."""
    lengths: str
    """``uneven``: geometric, mean a quarter of the limit; ``limit``: every response is as long as may be."""
    limit: int
    """Response tokens at most."""
    precision: str
    """``float32`` or ``bfloat16`` (autocast; the weights are float32 in both systems)."""
    inputs: str
    """Folder with the models and the prompts."""
    iterations: int = 3
    """That count; ``WARM_UP`` more are run."""
    samples: int = 64
    """An iteration; one optimizer step is taken on all of them."""
    n: int = 8
    """Samples of one prompt. TRL's PPO has no such thing: there the data set has each prompt ``n`` times."""
    kl_coef: float = 0.0
    """PPO: weight of the KL penalty in the reward. 0: strop needs no reference model, TRL's PPO has one."""
    rollout: str = "hf"
    """strop's rollout engine."""

    @property
    def name(self) -> str:
        """One line that tells settings apart."""
        more = "".join(
            f" {name}={getattr(self, name)}"
            for name in ("n", "kl_coef", "rollout")
            if getattr(self, name) != type(self).__dataclass_fields__[name].default
        )
        return f"{self.algorithm} {self.model} {self.lengths} {self.limit} {self.precision}{more}"

    @property
    def total_iterations(self) -> int:
        """With the warm-up."""
        return WARM_UP + self.iterations

    @property
    def prompts_in_all(self) -> int:
        """How many ``prompts`` holds."""
        once = self.samples // self.n
        return once if self.algorithm == "ppo" else once * self.total_iterations

    @property
    def model_folder(self) -> Path:
        """A Hugging Face folder, without tokenizer."""
        return Path(self.inputs) / self.model

    @property
    def tokenizer_folder(self) -> Path:
        """A folder of its own: beside a Qwen2 model, transformers would take it for Qwen2's tokenizer."""
        return Path(self.inputs) / f"{self.model}-tokenizer"

    @property
    def prompts(self) -> Path:
        """Parquet file with the prompts; PPO has the same in every iteration, because TRL shuffles them."""
        return Path(self.inputs) / f"{self.model}-{self.algorithm}-{self.n}.parquet"

    def planned_lengths(self, iteration: int) -> list[int] | None:
        """Tokens, with the end token, of every sample of an iteration (from 0); None: all have ``limit``."""
        if self.lengths == "limit":
            return None
        stream = random.Random(f"lengths of iteration {iteration}")
        miss = math.log(1 - 4 / self.limit)  # of a geometric distribution with mean limit / 4
        drawn = (1 + int(math.log(1 - stream.random()) / miss) for _ in range(self.samples))
        return [min(length, self.limit) for length in drawn]

    def write(self, path: Path) -> Path:
        """As JSON; returns ``path``."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def read(cls, path: str | Path) -> Setting:
        """What ``write`` wrote."""
        return cls(**json.loads(Path(path).read_text()))

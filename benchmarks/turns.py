"""What several turns cost rollout `hf`: processor time of a sampled token, and seconds beside slow tools.

    PYTHONPATH=examples python benchmarks/turns.py [--models 140k 5M] [--rounds 3] [--out FILE]

64 samples (16 prompts of 4, of 32 to 64 tokens) take 8 turns of 16 tokens: each one of 16 (even), or of 1 to
64 (uneven, geometric). An environment answers with 8 digits, 10 tokens with what the chat template puts
around them. Models are random Qwen2s; one thread.

1. An environment that answers at once. Milliseconds of this process's processor time a sampled token with 1
   turn, with 8, and with 1 turn that is as long as 8, alternating, medians of the rounds. Answers: what
   requests, bridge and insertion take of it with 8 turns, for a turn, as a share of the processor time, and
   as a share of the seconds, with the environment's process.
2. A tool that sleeps for 0.3 s, 64 at a time in one process. Seconds a batch, the part of it in which turns
   are answered, and what no order of calls can go below: 8 x 0.3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from machine import description
from torch import Tensor
from transformers import PreTrainedModel

from strop.config.load import load_config
from strop.environments.loading import load_environments
from strop.environments.pool import EnvironmentPool
from strop.passed import passing
from strop.rollout.base import SamplingParams
from strop.rollout.episodes import Episodes
from strop.rollout.hf import decoding
from strop.rollout.hf import engine as hf
from strop.rollout.turn_format import TurnFormat

from rollout_hf import build, prompts_of
from tiny_model import build_tokenizer

TURNS, SAMPLES, N = 8, 64, 4
TURN, LONGEST = 16, 64
TOOL_S = 0.3
END = 1
"""Id of the end token, of the models and of the tokenizer."""
MARK = 2.0  # in place of a uniform number: the token there is the end token


def even(seed: int) -> int:
    return TURN


def uneven(seed: int) -> int:
    number = random.Random(seed).random()
    return min(LONGEST, 1 + int(math.log(1 - number) / math.log(1 - 1 / TURN)))


def whole(seed: int) -> int:
    return TURNS * TURN


class AtOnce:
    """Answer with eight digits."""

    def reset(self) -> None:
        pass

    def respond(self, response: str, turn: int) -> str:
        return "12345678"


class Slow(AtOnce):
    """Answer after 0.3 s."""

    def respond(self, response: str, turn: int) -> str:
        time.sleep(TOOL_S)
        return "12345678"


class Timed(Episodes):
    """Episodes that measure how long turns are answered."""

    seconds = cpu = 0.0

    def answer(self, places: Sequence[Any]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        super().answer(places)
        self.seconds += time.perf_counter() - began
        self.cpu += time.process_time() - cpu


class Measured(NamedTuple):
    """A call of the rollout; processor time is of this process."""

    token_ms: float
    seconds: float
    answering_s: float
    answer_ms: float
    """Processor time of a turn's answer."""
    cpu_share: float
    """Of answers."""

    @property
    def share(self) -> float:
        return self.answering_s / self.seconds


@contextlib.contextmanager
def ends_at(length: Callable[[int], int]) -> Generator[None]:
    """Let turns end after as many tokens as ``length`` gives for their seeds."""
    draw, sample = hf.draw_uniforms, decoding.next_tokens

    def draw_with_ends(seeds: Iterable[int], tokens: int) -> Tensor:
        seeds = list(seeds)
        uniforms_RT = draw(seeds, tokens)
        uniforms_RT[torch.arange(len(seeds)), torch.tensor([length(seed) - 1 for seed in seeds])] = MARK
        return uniforms_RT

    def sample_with_ends(
        logits_RV: Tensor, uniforms_R: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        logits_RV[:, END] = -torch.inf
        tokens_R, log_probs_R = sample(logits_RV, uniforms_R, params)
        return torch.where(uniforms_R == MARK, END, tokens_R), log_probs_R

    with (
        mock.patch.object(hf, "draw_uniforms", draw_with_ends),
        mock.patch.object(decoding, "next_tokens", sample_with_ends),
    ):
        yield


def rollout_of(model: PreTrainedModel, environment: type, turns: int) -> hf.HFRollout:
    """Return a rollout whose samples have so many turns."""
    name = f"function:{environment.__name__}-0"
    config = load_config(["actor_rollout_ref.model.path=m", "data.train_files=f"])
    section = config.environment.model_copy(update={"path": {"": name}, "max_turns": turns})
    config = config.model_copy(update={"environment": section})
    with passing({name: environment}):
        environments = load_environments(section)
    assert environments is not None
    form = TurnFormat(config, environments, build_tokenizer(), [END])
    episodes = Timed(environments, section, form, EnvironmentPool(environments, section))
    return hf.HFRollout(model, pad_token_id=0, eos_token_ids=[END], episodes=episodes)


def measure(rollout: hf.HFRollout, length: Callable[[int], int]) -> Measured:
    """Generate a batch."""
    episodes: Any = rollout._episodes
    episodes.seconds = episodes.cpu = 0.0
    prompts = prompts_of(SAMPLES // N, 64, N, rollout.model.config.vocab_size)
    prompts.non_tensor_batch["prompt"] = ["1"] * len(prompts)
    params = SamplingParams(max_tokens=TURNS * (LONGEST + TURN), n=N)
    began, cpu = time.perf_counter(), time.process_time()
    with ends_at(length):
        result = rollout.generate(prompts, params).batch
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    tokens, turns = int(result["response_mask"].sum()), int(result["n_turns"].sum())
    return Measured(
        1e3 * cpu / tokens, seconds, episodes.seconds, 1e3 * episodes.cpu / turns, episodes.cpu / cpu
    )


def median(found: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)


def cost_rows(name: str, model: PreTrainedModel, rounds: int) -> list[str]:
    """Return the lines of the first table."""
    one, many = (rollout_of(model, AtOnce, turns) for turns in (1, TURNS))
    for rollout in (one, many):
        measure(rollout, even)  # starts processes
    rows = []
    for length in (even, uneven):
        found: list[list[Measured]] = [[], [], []]
        for _ in range(rounds):
            for place, (rollout, own) in enumerate(((one, length), (many, length), (one, whole))):
                found[place].append(measure(rollout, own))
        first, turns, long = (median(each, "token_ms") for each in found)
        rows.append(
            f"| {name} | {length.__name__} | {first:.3f} | {turns:.3f} | {long:.3f} | {turns / first:.2f} | "
            f"{turns / long:.2f} | {median(found[1], 'answer_ms'):.2f} | "
            f"{100 * median(found[1], 'cpu_share'):.1f}% | {100 * median(found[1], 'share'):.1f}% |"
        )
    return rows


def tool_row(name: str, model: PreTrainedModel, rounds: int) -> str:
    """Return a line of the second table."""
    rollout = rollout_of(model, Slow, TURNS)
    measure(rollout, even)
    found = [measure(rollout, even) for _ in range(rounds)]
    seconds, answering = median(found, "seconds"), median(found, "answering_s")
    return (
        f"| {name} | {seconds:.2f} | {answering:.2f} | {TURNS * TOOL_S:.2f} | "
        f"{answering / (TURNS * TOOL_S):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["140k", "5M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: build(name) for name in options.models}
    costs = [row for name, model in models.items() for row in cost_rows(name, model, options.rounds)]
    tools = [tool_row(name, model, options.rounds) for name, model in models.items()]
    text = "\n".join(
        [
            "# Turns",
            "",
            description("torch", "transformers", threads=1),
            f"`benchmarks/turns.py`, medians of {options.rounds} rounds; its docstring explains the columns.",
            "",
            "| model | turns | 1 turn (ms) | 8 turns (ms) | 1 as long (ms) | 8 / 1 | 8 / as long | "
            "answer (ms a turn) | of processor time | of seconds |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *costs,
            "",
            "| model | tool of 0.3 s: seconds a batch | answering | least | answering / least |",
            "| --- | ---: | ---: | ---: | ---: |",
            *tools,
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()

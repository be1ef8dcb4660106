"""Compare strop's log-prob and update phases with the machine's limits.

    python benchmarks/floors.py [--rounds 3] [--threads 2] [--models 5M 30M] [--out FILE.md]

Two baselines alternate with strop in the same run. Plain torch: forward (or forward, backward, clipping and
AdamW) over the packed real tokens of the same batch in the same micro-batches, with attention one sequence at
a time (``plain_qwen2.py``). Peak: floating-point operations per second relative to
those of a large matrix product. A batch has 64 samples of planned lengths, of 8 prompts or of 64; strop
computes each prompt once for its samples, plain torch does not. Speed is plain seconds over strop's seconds:
1 is as fast as plain torch. The phase "iteration" is all of one, with generation; its share of the peak
counts the operations that it needs (``work.py``), not those that strop executes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from plain_qwen2 import PlainQwen2
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from strop.config.load import load_config
from strop.engines.micro_batches import MicroBatching
from strop.protocol import DataProto
from strop.trainer.build import build_trainer
from strop.trainer.metrics import PhaseTimer
from strop.trainer.ray_trainer import RayPPOTrainer

from rollout_hf import build

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from side_by_side.inputs import write_inputs
from side_by_side.planned_ends import planned_ends
from side_by_side.setting import Setting
from side_by_side.strop_run import overrides
from work import DTYPES, iteration_operations, peak, seconds


class Plain:
    """Straightforward training loop in plain torch, without padding."""

    def __init__(self, name: str, batch: DataProto, dtype: torch.dtype, micro: MicroBatching) -> None:
        self.model = PlainQwen2(build(name))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.dtype = dtype
        columns = batch.batch
        self.tokens = columns["response_mask"].sum()
        self.pieces = [
            {
                name: columns[name][rows]
                for name in ("input_ids", "attention_mask", "response_mask", "advantages")
            }
            for rows in micro.split(batch, packed=True)
        ]

    def log_probs(self, piece: dict[str, Tensor]) -> Tensor:
        """Return the log-probs of the response tokens, concatenated."""
        mask_BL = piece["attention_mask"].bool()
        response_BT = piece["response_mask"].bool()
        response_BL = torch.zeros_like(mask_BL)
        response_BL[:, -response_BT.shape[1] :] = response_BT
        with self._autocast():
            hidden_NH = self.model(piece["input_ids"][mask_BL], mask_BL.sum(1).tolist())
            before_n = response_BL[mask_BL].nonzero()[:, 0] - 1
            logits_nV = self.model.logits(hidden_NH[before_n])
        tokens_n = piece["input_ids"][response_BL]
        return logits_nV.float().log_softmax(-1).gather(1, tokens_n[:, None])[:, 0]

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype)

    @torch.no_grad()
    def infer(self) -> None:
        for piece in self.pieces:
            self.log_probs(piece)

    def update(self) -> None:
        for piece in self.pieces:
            advantages_n = piece["advantages"][piece["response_mask"].bool()]
            (-(advantages_n * self.log_probs(piece)).sum() / self.tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Strop:
    """Trainer after one iteration, with the phases to measure."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        config = load_config(overrides(setting, folder))
        self.trainer: RayPPOTrainer = build_trainer(config)
        self.trainer.init_workers()
        self._ends = planned_ends(setting)
        self._ends.__enter__()
        self._prompts = iter(self.trainer.train_loader)
        self.batch, _ = self.trainer.step(next(self._prompts))
        self.micro = MicroBatching(max_tokens=config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu)

    def close(self) -> None:
        self._ends.__exit__(None, None, None)
        self.trainer.shutdown()

    def iteration(self) -> DataProto:
        """Run one more iteration; the setting plans how many there can be."""
        return self.trainer.step(next(self._prompts))[0]

    def infer(self) -> None:
        names = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        self.trainer.actor.compute_log_prob(self.batch.select(*names))

    def update(self) -> None:
        self.trainer.ppo.start_actor_update(self.batch, PhaseTimer(), 1, recorded=False).get()


def compare(setting: Setting, rounds: int, folder: Path) -> list[str]:
    """Measure both phases; return their table rows."""
    strop = Strop(setting, folder / "run")
    plain = Plain(setting.model, strop.batch, DTYPES[setting.precision], strop.micro)
    limit, lines = peak(DTYPES[setting.precision]), []
    for phase in ("infer", "update"):
        found = {}
        works = {"plain": getattr(plain, phase), "strop": getattr(strop, phase)}
        operations = {name: flops(work) for name, work in works.items()}  # also warms up
        for _ in range(rounds):
            for name, work in works.items():
                found.setdefault(name, []).append(seconds(work))
        medians = {name: statistics.median(several) for name, several in found.items()}
        shares = [operations[name] / medians[name] / limit for name in works]
        cells = [
            *_labels(setting),
            {"infer": "log-probs", "update": "update"}[phase],
            *(f"{medians[name]:.2f}" for name in works),
            f"{medians['plain'] / medians['strop']:.2f}",
            *(f"{share:.2f}" for share in shares),
            f"{limit / 1e9:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shares, several = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        batch = strop.iteration()
        several.append(time.perf_counter() - began)
        lengths = batch.batch["response_mask"].sum(1).int().tolist()
        shares.append(iteration_operations(setting, lengths) / several[-1] / limit)
    median, share = statistics.median(several), statistics.median(shares)
    cells = [*_labels(setting), "iteration", "-", f"{median:.2f}", "-", "-", f"{share:.2f}"]
    cells.append(f"{limit / 1e9:.0f}")
    lines.append(f"| {' | '.join(cells)} |")
    strop.close()
    return lines


def _labels(setting: Setting) -> list[str]:
    return [setting.model, setting.precision, setting.lengths, str(setting.samples // setting.n)]


def flops(work: Callable[[], object]) -> float:
    """Count the floating-point operations of matrix products."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


TITLES = (
    *("model", "precision", "lengths", "prompts", "phase"),
    *("plain s", "strop s", "speed", "plain/peak", "strop/peak", "peak, GFLOP/s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--models", nargs="+", default=["5M", "30M"])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "# Log-probs and updates against plain torch and the matrix product",
        "",
        machine.description("torch", "transformers", threads=options.threads),
        "",
        f"| {' | '.join(TITLES)} |\n|{' --- |' * 5}{' ---: |' * (len(TITLES) - 5)}",
    ]
    print("\n".join(lines), flush=True)
    for model, precision, lengths, n in itertools.product(
        options.models, DTYPES, ("limit", "uneven"), (8, 1)
    ):
        with tempfile.TemporaryDirectory() as folder:
            limit = 64 if lengths == "limit" else 128
            setting = Setting(model, "grpo", lengths, limit, precision, folder, options.rounds, n=n)
            write_inputs([setting])
            rows = compare(setting, options.rounds, Path(folder))
            print("\n".join(rows), flush=True)
            lines += rows
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

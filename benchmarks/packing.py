"""Measure the speed-up of `use_remove_padding` in a forward and backward pass.

    python benchmarks/packing.py [--rounds 3] [--models 5M 30M] [--rows 32] [--shortest 32]

CPU seconds of one thread for the policy's gradient, packed and padded in alternation, and ratios of the
medians. Lengths are spread 1:8, evenly or geometrically (as many between 1 and 2 as between 4 and 8). Each
prompt has 1 or 8 samples; packed passes compute the prompt once. Padded passes take rows in the given
order, as most trainers do ("padded"), or sorted by length, as strop's engine splits micro-batches ("sorted");
all rows at once, or 8 at a time. The last column is padded over real tokens of the whole batch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.engines.micro_batches import MicroBatching, trim
from strop.models.policy import PolicyModel
from strop.protocol import DataProto

from rollout_hf import MODELS, build


def spread_lengths(count: int, shortest: float, spread: str, generator: torch.Generator) -> Tensor:
    """Return lengths [count, 1] from ``shortest`` to 8 times that, in random order."""
    places = torch.linspace(0, 1, count)
    lengths = (shortest * (8**places if spread == "geometric" else 1 + 7 * places)).round().long()
    return lengths[torch.randperm(count, generator=generator)][:, None]


def samples(rows: int, n: int, shortest: int, vocabulary: int, spread: str) -> DataProto:
    """Return ``n`` responses per prompt; the lengths of both start at half of ``shortest``, spread 1:8."""
    generator = torch.Generator().manual_seed(0)
    prompts = spread_lengths(rows // n, shortest / 2, spread, generator).repeat_interleave(n, dim=0)
    # with n == 1 a response is as long as its prompt, so that whole sequences are spread 1:8 too
    responses = prompts if n == 1 else spread_lengths(rows, shortest / 2, spread, generator)
    width = int(prompts.max())
    columns = torch.arange(width)
    prompt_mask, response_mask = columns >= width - prompts, columns < responses
    mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    prompt_ids = torch.randint(1, vocabulary, (rows // n, width), generator=generator)
    ids = torch.cat(
        [
            prompt_ids.repeat_interleave(n, dim=0),
            torch.randint(1, vocabulary, (rows, width), generator=generator),
        ],
        dim=1,
    )
    ids *= mask
    return DataProto(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            "responses": ids[:, width:],
            "response_mask": response_mask.float(),
        }
    )


def cpu_seconds(policy: PolicyModel, batch: DataProto, pieces: list[Tensor]) -> float:
    """Measure one gradient of the sum of log-probs and entropies."""
    start = time.process_time()
    for rows in pieces:
        outputs = policy(trim(batch[rows]), with_entropy=True)
        (outputs["log_prob"].sum() + outputs["entropy"].sum()).backward()
    return time.process_time() - start


def compare(model: PreTrainedModel, batch: DataProto, at_once: int, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each variant."""
    packed, padded = PolicyModel(model, packed=True), PolicyModel(model)
    by_length = MicroBatching(rows=at_once).split(batch)
    by_prompt = MicroBatching(rows=at_once).split(batch, packed=True)
    ways = {
        "padded": (padded, list(torch.arange(len(batch)).split(at_once))),
        "sorted": (padded, by_length),
        "packed": (packed, by_prompt),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (policy, pieces) in ways.items():
            model.zero_grad(set_to_none=True)
            seconds[way].append(cpu_seconds(policy, batch, pieces))
    return {way: statistics.median(found) for way, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["5M", "30M"], choices=MODELS)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("model spread    n rows   padded   sorted   packed  padded/ sorted/packed  columns/tokens")
    for name in args.models:
        model = build(name)
        for spread, n, at_once in itertools.product(("even", "geometric"), (1, 8), (args.rows, 8)):
            batch = samples(args.rows, n, args.shortest, model.config.vocab_size, spread)
            medians = compare(model, batch, at_once, args.rounds)
            figures = " ".join(f"{found:8.2f}" for found in medians.values())
            ratios = " ".join(f"{medians[way] / medians['packed']:7.2f}" for way in ("padded", "sorted"))
            mask = batch.batch["attention_mask"]
            print(
                f"{name:>5} {spread:9} {n} {at_once:4} {figures}  {ratios} {mask.numel() / mask.sum():20.2f}"
            )


if __name__ == "__main__":
    main()

"""Record losses and gradients of TRL's preference losses, with which test_trl_dpo.py compares strop's.

    PYTHONPATH=examples benchmarks/.venv-trl/bin/python tests/parity/trl_dpo.py   # writes trl_dpo.json

``make bench`` builds an environment with TRL. The models are functions of parameter names and numbers, so no
file of weights is part of the record. dpo, hinge, ipo and their sum with TRL's ``sft`` (strop's
``nll_coef``) are DPOTrainer's; cdpo is its ``aot`` on single pairs, where sorting them is no change. simpo is
CPOTrainer's, and orpo ORPOTrainer's odds-ratio term beside the answers' mean negative log-likelihood (TRL's
own runs over the prompt, too).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tiny_model

FILE = Path(__file__).with_suffix(".json")
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo", "beta": 0.3},
    "cdpo": {"loss": "cdpo", "beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "hinge": {"loss": "hinge", "beta": 0.5},
    "dpo with nll": {"loss": "dpo", "beta": 0.3, "nll_coef": 0.7},
    "simpo": {"loss": "simpo", "beta": 2.5, "gamma": 0.8},
    "orpo": {"loss": "orpo", "beta": 0.4},
}
"""Name -> keys of ``update``."""
PAIRS = [
    ("12+9=", "21", "3"),
    ("7+50=", "57", "755"),
    ("3*3=", "9", "27 "),
    ("99+1=", "100", "99+1=1"),
    ("8-5=", "3", "13"),
]


def model(number: int) -> Any:
    """Return the tiny model with weights drawn from N(0, 0.3), around 1 in norms."""
    found = tiny_model.build_model(tiny_model.build_tokenizer(), hidden=16)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            draw = np.random.default_rng((number, zlib.crc32(name.encode())))
            values = torch.from_numpy(draw.normal(scale=0.3, size=tuple(weight.shape)))
            weight.copy_(values + ("norm" in name))
    return found.eval()


def summary(gradients: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return of each parameter's gradient its norm, four projections, and the first four numbers."""
    found = {}
    for name, gradient in gradients.items():
        flat = gradient.detach().double().flatten()
        places = torch.arange(len(flat), dtype=torch.float64)
        projections = [float(flat @ torch.cos(step * places)) for step in (0.1, 0.7, 1.3, 2.9)]
        figures = [float(flat.norm()), *projections, *flat[:4].tolist()]
        found[name] = [float(f"{figure:.8g}") for figure in figures]
    return found


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """Return a policy's gradients by parameter."""
    return {name: weight.grad.clone() for name, weight in policy.named_parameters()}


def rows() -> list[dict[str, Any]]:
    """Return the pairs as chat messages."""
    return [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        for prompt, chosen, rejected in PAIRS
    ]


def of_dpo_trainer(update: dict[str, Any], folder: str) -> tuple[float, dict[str, torch.Tensor], Any]:
    """Return loss and gradients of all pairs by DPOTrainer, and the trainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    kinds = {"dpo": "sigmoid", "cdpo": "aot"}
    loss_types, weights = [kinds.get(update["loss"], update["loss"])], [1.0]
    if "nll_coef" in update:
        loss_types, weights = [*loss_types, "sft"], [*weights, update["nll_coef"]]
    settings = DPOConfig(
        output_dir=folder,
        loss_type=loss_types,
        loss_weights=weights,
        beta=update["beta"],
        label_smoothing=update.get("label_smoothing", 0.0),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_length=None,
    )
    policy = model(0)
    trainer = DPOTrainer(
        model=policy,
        ref_model=model(1),
        args=settings,
        train_dataset=Dataset.from_list(rows()),
        processing_class=tiny_model.build_tokenizer(),
    )
    trainer.model.train()
    examples = [trainer.train_dataset[row] for row in range(len(PAIRS))]
    batches = [[example] for example in examples] if update["loss"] == "cdpo" else [examples]
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(batch)) / len(batches)
        loss.backward()
        total += loss.item()
    return total, gradients(policy), trainer


def without_reference(update: dict[str, Any], examples: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of all pairs by the losses of CPOTrainer and ORPOTrainer."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    policy = model(0)

    def mean_log_probs(name: str) -> torch.Tensor:
        found = []
        for example in examples:
            prompt, answer = example["prompt_ids"], example[f"{name}_ids"]
            labels = torch.tensor([[-100] * len(prompt) + answer])
            logits = policy(torch.tensor([prompt + answer])).logits
            found.append(ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=True))
        return torch.cat(found)

    chosen, rejected = mean_log_probs("chosen"), mean_log_probs("rejected")
    settings: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=update["beta"],
        alpha=0.0,
        label_smoothing=0.0,
        loss_type="simpo",
        simpo_gamma=update.get("gamma"),
    )
    if update["loss"] == "simpo":
        loss = CPOTrainer.cpo_loss(settings, chosen, rejected)[0].mean()
    else:
        loss = -chosen.mean() - ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0].mean()
    loss.backward()
    return loss.item(), gradients(policy)


def main() -> None:
    import transformers
    import trl

    record: dict[str, Any] = {"trl": trl.__version__, "transformers": transformers.__version__}
    whole, examples = {}, None
    with tempfile.TemporaryDirectory() as folder:
        for name, update in LOSSES.items():
            if update["loss"] in ("simpo", "orpo"):
                loss, found = without_reference(update, examples)
            else:
                loss, found, trainer = of_dpo_trainer(update, folder)
                examples = examples or [trainer.train_dataset[row] for row in range(len(PAIRS))]
            record[name] = {"loss": loss, "gradients": summary(found)}
            whole[name] = found
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    record["ids"] = [[example[name] for name in names] for example in examples or []]
    FILE.write_text(re.sub(r"\n {3,}", " ", json.dumps(record, indent=1)) + "\n")
    if len(sys.argv) > 1:
        torch.save(whole, sys.argv[1])


if __name__ == "__main__":
    main()

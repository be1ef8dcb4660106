"""A short supervised phase: the model learns what an answer looks like, and is right some of the time.

Reinforcement learning needs something to reinforce. Plain AdamW on prompt and answer, with the loss on the
answer's tokens (the end token included).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress
from torch.nn.functional import cross_entropy

Pair = tuple[list[dict[str, str]], str]


def encode(tokenizer: Any, pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
    """Left-padded ``input_ids``, ``attention_mask`` and ``labels`` [B, L]; -100 where no loss is taken."""
    rows = []
    for messages, answer in pairs:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((prompt + reply, [-100] * len(prompt) + reply))
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids, _ in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows]),
        "labels": torch.tensor([[-100] * (width - len(labels)) + labels for _, labels in rows]),
    }


@torch.no_grad()
def sampled_accuracy(model: Any, data: dict[str, torch.Tensor]) -> float:
    """The share of sampled answers that would be right: the mean probability of the whole right answer."""
    batch = dict(data)
    labels = batch.pop("labels")[:, 1:]
    log_probs = model(**batch, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
    taken = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return taken.where(labels >= 0, 0.0).sum(dim=1).exp().mean().item()


def warm_up(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    until: float,
    max_steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> int:
    """Train ``model`` in place until ``sampled_accuracy`` on 512 training pairs reaches ``until``.

    It is looked at every ten steps; returns the number of steps.
    """
    data = encode(tokenizer, pairs)
    data["position_ids"] = (data["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    judged = {name: tensor[:512] for name, tensor in data.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(seed)
    with Progress() as progress:
        task = progress.add_task("supervised warm-up", total=until)
        for step in range(1, max_steps + 1):
            rows = torch.randint(len(pairs), (batch_size,), generator=generator)
            batch = {name: tensor[rows] for name, tensor in data.items()}
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / 20)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                accuracy = sampled_accuracy(model, judged)
                progress.update(task, completed=min(accuracy, until))
                if accuracy >= until:
                    return step
    return max_steps

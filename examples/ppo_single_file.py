"""PPO for a language model in one file of plain torch: read it from top to bottom.

A tiny GPT learns to add two numbers. It first trains on solved problems until about half of its answers are
right; from then on its only feedback is a reward of 0 or 1. Run it (about a minute on a CPU):

    python examples/ppo_single_file.py

Four steps make one iteration. They are the same in strop, which is tested against this file:

    1. sample     the policy answers a batch of problems; each answer is scored 0 or 1
    2. remember   the policy's log-probs and the critic's values of those answers, before any update
    3. judge      generalised advantage estimation: which tokens did better than the critic expected?
    4. update     critic and policy take a few clipped gradient steps on that batch

Left out on purpose: Hugging Face models and chat templates, prompts of different lengths, a reference model
and its KL penalty, a reward model, a key-value cache, bfloat16, several processes, checkpoints.

Shapes: B samples, P prompt tokens, T response tokens (padded on the right), L = P + T, V vocabulary, D width.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

Problem = tuple[str, str]  # " 12+7=", "19"
Model = Callable[[Tensor, Tensor, Tensor], Tensor]  # (input_ids, attention_mask, position_ids), all [B,L]
Batch = dict[str, Tensor]

# ---------------------------------------------------------------------------------------------- the task

PAD, END = 0, 1
CHARACTERS = " 0123456789+="
VOCABULARY = 2 + len(CHARACTERS)


def encode(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def make_problems(largest: int, rng: random.Random) -> list[Problem]:
    """Return every addition of two numbers from 0 to ``largest``, shuffled; questions have equal lengths."""
    numbers, width = range(largest + 1), len(f"{largest}+{largest}=")
    problems = [(f"{a}+{b}=".rjust(width), str(a + b)) for a in numbers for b in numbers]
    rng.shuffle(problems)
    return problems


def score(problems: list[Problem], response_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return 1 for the right answer followed by END, else 0: [B]."""
    right = []
    for (_, answer), ids, mask in zip(problems, response_ids_BT.tolist(), mask_BT.tolist(), strict=True):
        sampled = ids[: int(sum(mask))]  # cut by its length: the pad id can be sampled too
        right.append(float(sampled == [*encode(answer), END]))
    return torch.tensor(right)


# -------------------------------------------------------------------------------------------- the models


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x_BLD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(seen.transpose(1, 2).flatten(2))
        return x_BLD + self.down(gelu(self.up(self.norm_2(x_BLD))))


class GPT(nn.Module):
    """Transformer with ``outputs`` numbers per position: logits [B,L,V] for the policy.

    The attention mask is unused: padding only follows the answer, and attention is causal.
    """

    def __init__(
        self, outputs: int, width: int = 64, layers: int = 2, heads: int = 4, longest: int = 16
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)  # a small model learns faster from large weights

    def forward(self, input_ids: Tensor, _attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x_BLD = self.tokens(input_ids) + self.positions(position_ids)
        return self.head(self.norm(self.blocks(x_BLD)))


class Critic(nn.Module):
    """Values [B,L]: a copy of the policy with one output per position instead of logits."""

    def __init__(self, policy: GPT) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy)
        width = policy.head.in_features
        self.body.head = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.body.head.weight, std=1 / math.sqrt(width + 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.body(input_ids, attention_mask, position_ids).squeeze(-1)


# -------------------------------------------------------------------------------- the mathematics of PPO


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum where the mask is 1. A product with the mask would let a NaN at a masked place through."""
    return torch.where(mask_BT > 0, x_BT, 0.0).sum()


def token_log_probs(logits_BTV: Tensor, ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log p(id) of each token under softmax(logits / temperature): [B,T], float32."""
    log_probs_BTV = (logits_BTV.float() / temperature).log_softmax(dim=-1)
    return log_probs_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of each token's distribution: [B,T], float32."""
    log_probs_BTV = (logits_BTV.float() / temperature).log_softmax(dim=-1)
    return -(log_probs_BTV.exp() * log_probs_BTV).sum(dim=-1)


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438): advantages and returns [B,T].

    From the last token backwards: delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1),
    with V = A = 0 after the end. Tokens with mask 0 are skipped.
    """
    advantages_BT, returns_BT = torch.zeros_like(values_BT), torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        real_B = mask_BT[:, t] > 0
        advantages_BT[:, t] = torch.where(real_B, advantage_B, 0.0)
        returns_BT[:, t] = torch.where(real_B, advantage_B + values_BT[:, t], 0.0)
        next_value_B = torch.where(real_B, values_BT[:, t], next_value_B)
        next_advantage_B = torch.where(real_B, advantage_B, next_advantage_B)
    return advantages_BT, returns_BT


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Normalise to mean 0 and (unbiased) variance 1 over all real tokens of the batch; 0 elsewhere."""
    count = mask_BT.sum()
    mean = masked_sum(x_BT, mask_BT) / count
    variance = masked_sum((x_BT - mean).square(), mask_BT) / (count - 1)
    return torch.where(mask_BT > 0, (x_BT - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def policy_loss(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, clip_ratio: float
) -> Tensor:
    """Clipped surrogate of each token [B,T] (Schulman et al., arXiv:1707.06347, equation 7).

    The ratio is the token's probability relative to the policy that sampled it. Once it leaves
    1 +- clip_ratio in the direction that the advantage favours, the loss is flat and the gradient zero.
    """
    ratio_BT = (log_probs_BT - old_log_probs_BT).clamp(-20, 20).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_ratio, 1 + clip_ratio)
    return torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, cliprange_value: float
) -> Tensor:
    """Half the squared error of each token [B,T]: the larger of the value's and the clipped value's."""
    clipped_BT = values_BT.clamp(old_values_BT - cliprange_value, old_values_BT + cliprange_value)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (clipped_BT - returns_BT).square())


# ---------------------------------------------------------------------------------------- one PPO update


@dataclass(frozen=True)
class HyperParameters:
    mini_batch_size: int = 128  # samples per optimizer step
    micro_batch_size: int = 128  # samples in memory at once; does not affect results
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    cliprange_value: float = 0.5
    entropy_coeff: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    temperature: float = 1.0
    grad_clip: float = 1.0


def responses(batch: Batch) -> Tensor:
    return batch["input_ids"][:, -batch["response_mask"].shape[1] :]


def run_on_responses(model: Model, batch: Batch) -> Tensor:
    """Return the model's outputs for the response tokens, [B,T] or [B,T,V].

    The output for token t is at position t - 1, which attends to all tokens before t.
    """
    output = model(batch["input_ids"], batch["attention_mask"], batch["position_ids"])
    return output[:, -batch["response_mask"].shape[1] - 1 : -1]


def policy_objective(policy: Model, batch: Batch, hp: HyperParameters) -> Tensor:
    """Policy loss of each token [B,T]."""
    logits_BTV = run_on_responses(policy, batch)
    log_probs_BT = token_log_probs(logits_BTV, responses(batch), hp.temperature)
    loss_BT = policy_loss(log_probs_BT, batch["old_log_probs"], batch["advantages"], hp.clip_ratio)
    return loss_BT - hp.entropy_coeff * entropy(logits_BTV, hp.temperature)


def value_objective(critic: Model, batch: Batch, hp: HyperParameters) -> Tensor:
    """Value loss of each token [B,T]."""
    values_BT = run_on_responses(critic, batch).float()
    return value_loss(values_BT, batch["values"], batch["returns"], hp.cliprange_value)


def split(batch: Batch, size: int) -> list[Batch]:
    """Split into consecutive chunks of ``size`` rows; the last one may be smaller."""
    starts = range(0, len(batch["input_ids"]), size)
    return [{name: rows[start : start + size] for name, rows in batch.items()} for start in starts]


def optimize(
    objective: Callable[[Model, Batch, HyperParameters], Tensor],
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    hp: HyperParameters,
) -> float:
    """Take one optimizer step per mini-batch for ``ppo_epochs`` epochs; return the mean loss per token.

    The loss of a mini-batch is the mean over its tokens. Each micro-batch's sum is divided by the
    mini-batch's token count, not by its own, so the gradient does not depend on the micro-batch size.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    loss_sum = tokens_seen = 0.0
    for _ in range(hp.ppo_epochs):
        for mini_batch in split(batch, hp.mini_batch_size):
            token_count = mini_batch["response_mask"].sum()
            optimizer.zero_grad()
            for micro_batch in split(mini_batch, hp.micro_batch_size):
                loss = masked_sum(objective(model, micro_batch, hp), micro_batch["response_mask"])
                (loss / token_count).backward()
                loss_sum += loss.item()
            nn.utils.clip_grad_norm_(weights, hp.grad_clip)
            optimizer.step()
            tokens_seen += token_count.item()
    return loss_sum / tokens_seen


def ppo_update(
    policy: Model,
    critic: Model,
    policy_optimizer: torch.optim.Optimizer | None,
    critic_optimizer: torch.optim.Optimizer,
    batch: Batch,
    hp: HyperParameters,
) -> dict[str, float]:
    """Run steps 3 and 4: train critic and policy in place on a batch of scored answers; return their losses.

    ``batch`` holds input_ids, attention_mask and position_ids [B,L], and response_mask, old_log_probs,
    values and token_level_rewards [B,T]. Without a ``policy_optimizer`` only the critic is updated.
    """
    mask_BT = batch["response_mask"]
    advantages_BT, returns_BT = gae(batch["token_level_rewards"], batch["values"], mask_BT, hp.gamma, hp.lam)
    batch = {**batch, "advantages": whiten(advantages_BT, mask_BT), "returns": returns_BT}
    metrics = {"critic/vf_loss": optimize(value_objective, critic, critic_optimizer, batch, hp)}
    if policy_optimizer is not None:
        metrics["actor/loss"] = optimize(policy_objective, policy, policy_optimizer, batch, hp)
    return metrics


# -------------------------------------------------------------------------------------- sample and score


def as_batch(input_ids: Tensor, mask_BT: Tensor) -> Batch:
    """Build the model inputs for prompts (real tokens only) followed by responses with that mask."""
    prompt_mask_BP = torch.ones(len(input_ids), input_ids.shape[1] - mask_BT.shape[1])
    attention_mask = torch.cat([prompt_mask_BP, mask_BT], dim=1).long()
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    names = ("input_ids", "attention_mask", "position_ids", "response_mask")
    return dict(zip(names, (input_ids, attention_mask, position_ids, mask_BT), strict=True))


@torch.no_grad()
def generate(policy: Model, problems: list[Problem], max_tokens: int, temperature: float) -> Batch:
    """Answer each problem token by token until END; temperature 0 is greedy."""
    input_ids = torch.tensor([encode(question) for question, _ in problems])
    mask_BT, going_B = torch.ones(len(problems), 0), torch.ones(len(problems))
    for _ in range(max_tokens):
        batch = as_batch(input_ids, mask_BT)
        logits_BV = policy(input_ids, batch["attention_mask"], batch["position_ids"])[:, -1]
        probs_BV = (logits_BV / (temperature or 1.0)).softmax(dim=-1)
        token_B = torch.multinomial(probs_BV, 1).squeeze(-1) if temperature else probs_BV.argmax(dim=-1)
        input_ids = torch.cat([input_ids, torch.where(going_B > 0, token_B, PAD).unsqueeze(-1)], dim=1)
        mask_BT = torch.cat([mask_BT, going_B.unsqueeze(-1)], dim=1)
        going_B = going_B * (token_B != END)
    return as_batch(input_ids, mask_BT)


def collect(
    policy: Model, critic: Model, problems: list[Problem], max_tokens: int, temperature: float
) -> Batch:
    """Run steps 1 and 2: return answers with rewards, log-probs and values for ``ppo_update``."""
    batch = generate(policy, problems, max_tokens, temperature)
    mask_BT = batch["response_mask"]
    rewards_BT = torch.zeros_like(mask_BT)
    last_B = mask_BT.sum(dim=1).long() - 1  # the answer's last token gets the whole reward
    rewards_BT[torch.arange(len(problems)), last_B] = score(problems, responses(batch), mask_BT)
    with torch.no_grad():
        log_probs_BT = token_log_probs(run_on_responses(policy, batch), responses(batch), temperature)
        values_BT = run_on_responses(critic, batch).float()
    return {**batch, "old_log_probs": log_probs_BT, "values": values_BT, "token_level_rewards": rewards_BT}


def accuracy(policy: Model, problems: list[Problem], max_tokens: int, temperature: float) -> float:
    """Fraction of right answers, one per problem."""
    batch = generate(policy, problems, max_tokens, temperature)
    return score(problems, responses(batch), batch["response_mask"]).mean().item()


# ------------------------------------------------------------------------------------------------ the run


def warm_up(policy: GPT, problems: list[Problem], steps: int, max_tokens: int, rng: random.Random) -> None:
    """Train on solved problems: PPO can only reinforce right answers that the policy already samples."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.01)
    for _ in range(steps):
        rows, lengths = [], []
        for question, answer in rng.sample(problems, min(256, len(problems))):
            padding = [PAD] * (max_tokens - len(answer) - 1)
            rows.append([*encode(question), *encode(answer), END, *padding])
            lengths.append(len(answer) + 1)
        mask_BT = (torch.arange(max_tokens) < torch.tensor(lengths).unsqueeze(-1)).float()
        batch = as_batch(torch.tensor(rows), mask_BT)
        log_probs_BT = token_log_probs(run_on_responses(policy, batch), responses(batch))
        optimizer.zero_grad()
        (-masked_sum(log_probs_BT, mask_BT) / mask_BT.sum()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def train(
    largest: int = 49, warm_up_steps: int = 110, iterations: int = 200, prompts: int = 64, n: int = 4,
    lr: float = 1e-3, seed: int = 1, hp: HyperParameters = HyperParameters(),
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Warm up, then run PPO; return held-out accuracies, [sampled, greedy], before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    problems = make_problems(largest, rng)
    held_out, training = problems[: len(problems) // 5], problems[len(problems) // 5 :]
    max_tokens = len(str(2 * largest)) + 1
    policy = GPT(VOCABULARY)
    warm_up(policy, training, warm_up_steps, max_tokens, rng)
    critic = Critic(policy)
    optimizers = [torch.optim.AdamW(model.parameters(), weight_decay=0.01) for model in (policy, critic)]
    before = [accuracy(policy, held_out * 8, max_tokens, 1.0), accuracy(policy, held_out, max_tokens, 0.0)]
    print(f"before PPO: accuracy {before[0]:.3f} sampled, {before[1]:.3f} greedy")
    rising = max(1, iterations // 10)
    for i in range(iterations):
        for optimizer in optimizers:  # Adam's first steps have full size: warm up, then decay to 0
            factor = (i + 1) / rising if i < rising else (iterations - i) / (iterations - rising)
            optimizer.param_groups[0]["lr"] = lr * factor
        drawn = [problem for problem in rng.sample(training, prompts) for _ in range(n)]
        batch = collect(policy, critic, drawn, max_tokens, hp.temperature)
        metrics = ppo_update(policy, critic, *optimizers, batch, hp)
        if (i + 1) % 25 == 0:
            reward = batch["token_level_rewards"].sum(dim=1).mean()
            print(f"iteration {i + 1}: reward {reward:.3f}, value loss {metrics['critic/vf_loss']:.3f}")
    after = [accuracy(policy, held_out * 8, max_tokens, 1.0), accuracy(policy, held_out, max_tokens, 0.0)]
    print(f"after PPO:  accuracy {after[0]:.3f} sampled, {after[1]:.3f} greedy")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=200)
    train(**vars(parser.parse_args()))

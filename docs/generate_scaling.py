"""Write the tables of docs/scaling.md: bytes and seconds of an iteration, from the sizes of strop's messages.

python docs/generate_scaling.py           write them
python docs/generate_scaling.py --check   exit 1 if the page is stale

Functions of sizes return bytes; tests/test_scaling.py compares them with what real ranks send.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from generated import write_or_check

from strop.columns import COLUMNS, TOKEN_COLUMNS
from strop.config.memory.choices import MOST_ON_A_GPU

PRODUCTS = 0.4 * 989e12
"""Operations a second of a GPU in training: H100 SXM, dense bf16, and the share of it that counts on."""
MEMORY = 0.7 * 3.35e12
"""Bytes a second from the memory of an H100 SXM while decoding, with the share that counts on."""
NVLINK = 450e9
"""Bytes a second and direction of a GPU inside a node."""
NETWORK = 50e9
"""Bytes a second and direction of a GPU's 400 Gbit/s port to other nodes."""
OBJECT_STORE = 2.5e9
"""Bytes a second between two nodes' object stores of Ray: one TCP stream, and copies in CPU memory."""
DISK = 5e9
"""Bytes a second of a node to the shared disk."""
NODE = 8
"""GPUs of a node."""
DRIVER_CALL = 1.9 / 64
"""Seconds of the driver's CPU for each rank and iteration (benchmarks/results/driver_2026-11-21.md)."""


RECORDED = ("rollout_log_probs", "old_log_probs", "entropys", "token_level_rewards", "advantages", "returns")
"""Columns with a number for each token in a samples file of GRPO."""


class Model:
    """Sizes of a decoder-only transformer, counted in the modules that transformers builds."""

    def __init__(self, name: str, **entries: Any) -> None:
        """Build the class ``name`` on the meta device; ``entries`` are those of its config.json."""
        self.config = getattr(transformers, f"{name}Config")(**entries)
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForCausalLM")(self.config)
        routed = [w for path, w in model.named_parameters() if ".experts." in path]
        self.parameters = model.num_parameters()
        self.in_layers = sum(w.numel() for w in model.model.layers.parameters())
        self.routed = sum(w.numel() for w in routed)
        """Parameters of routed experts."""
        self.experts = getattr(self.config, "num_experts", 0) if routed else 0
        self.chosen = self.config.num_experts_per_tok if routed else 0
        """Experts of a token."""

    @cached_property
    def active(self) -> float:
        """Parameters that compute with a token."""
        return self.parameters - self.routed * (1 - self.chosen / self.experts if self.experts else 0)

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values in 16 bits."""
        shape = self.config
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        return 4 * shape.num_hidden_layers * shape.num_key_value_heads * width


def ring(size: float, ranks: int) -> float:
    """Return what a rank sends in an all-gather or reduce-scatter of ``size`` bytes; all-reduce: twice."""
    return size * (ranks - 1) / ranks


def fsdp_pass(model: Model, ranks: int, itemsize: int = 2) -> float:
    """Return what a rank sends for one micro-batch without gradient: every unit is gathered."""
    return ring(itemsize * model.parameters, ranks)


def fsdp_update(model: Model, ranks: int, itemsize: int = 2) -> float:
    """Return what a rank sends for one micro-batch of an update.

    Layers are gathered twice, the rest stays between the passes; gradients are reduced in float32.
    """
    gathered = itemsize * (model.parameters + model.in_layers)
    return ring(gathered + 4 * model.parameters, ranks)


def gathered_weights(model: Model, ranks: int, itemsize: int = 2) -> float:
    """Return what a rank of FSDP2 sends for a rollout in the same processes, in the rollout's dtype."""
    return ring(itemsize * model.parameters, ranks)


def tensor_parallel(model: Model, tokens: int, answers: int, ranks: int, itemsize: int = 2) -> float:
    """Return what a rank sends for the activations of one micro-batch of an update.

    The forward pass is ``tensor_parallel_pass``. The backward pass does that of every layer twice, once to
    compute it again, and gathers the two inputs for the gradients of weights (with experts one). The
    gradients of the embeddings are gathered, and those of the head's input summed, in float32.
    """
    layers = model.config.num_hidden_layers
    hidden = model.config.hidden_size
    unit, first = (ring(tokens * hidden * size, ranks) for size in (itemsize, 4))
    forward = tensor_parallel_pass(model, tokens, answers, ranks, itemsize)
    backward = (5 if model.experts else 10) * layers * unit + first
    return forward + backward + 2 * ring(4 * answers * hidden, ranks)


def tensor_parallel_pass(model: Model, tokens: int, answers: int, ranks: int, itemsize: int = 2) -> float:
    """Return what a rank sends for the activations of one micro-batch without gradient.

    A layer gathers its input twice and scatters sums twice (sequence parallelism), with experts for attention
    alone; the head gathers its input. Embeddings are summed in float32, as are four numbers an answer token.
    """
    unit, first = (ring(tokens * model.config.hidden_size * size, ranks) for size in (itemsize, 4))
    per_layer = 2 if model.experts else 4
    return (per_layer * model.config.num_hidden_layers + 1) * unit + first + 2 * ring(16 * answers, ranks)


def pipeline(model: Model, tokens: int, tensor: int, itemsize: int = 2) -> float:
    """Return what a rank sends to the next stage, and receives of gradients, for one micro-batch."""
    return itemsize * tokens * model.config.hidden_size / tensor


def to_experts(model: Model, tokens: int, ranks: int, layers: int, itemsize: int = 2) -> float:
    """Return what a rank sends for its ``tokens`` of one pass: to experts and back.

    An update makes three: forward, forward again (recomputed layers) and backward.
    """
    return 2 * layers * ring(tokens * model.chosen * model.config.hidden_size * itemsize, ranks)


def megatron_step(dense: float, routed: float, copies: int, expert_copies: int) -> float:
    """Return what a rank sends in an optimizer step for its ``dense`` and ``routed`` parameters.

    Gradients are reduced and weights gathered in float32; megatron-core gathers them once for each of its
    two optimizers if there are experts.
    """
    gathers = 2 if routed else 1
    return 4 * (1 + gathers) * (ring(dense, copies) + ring(routed, expert_copies))


def through_driver(
    prompt: int,
    response: int,
    n: int = 1,
    *,
    handles: bool = True,
    critic: bool = False,
    reference: bool = False,
) -> tuple[float, float]:
    """Return bytes that the driver sends and receives per sample, of ``prompt`` + ``response`` tokens."""
    width = {"B": 1, "BP": prompt, "BT": response, "BL": prompt + response}
    size = {"int64": 8, "float32": 4, "bool": 1}

    def of(*names: str, shape: str | None = None) -> int:
        return sum(width[shape or COLUMNS[name].shape] * size[COLUMNS[name].dtype] for name in names)

    evaluated = ["old_log_probs", "entropys"] + ["ref_log_prob"] * reference + ["values"] * critic
    inputs = ("input_ids", "attention_mask", "position_ids")
    request = (of(*inputs, shape="BP") + 8 * n) / n
    if handles:
        read = of("response_mask", "attention_mask", "rollout_log_probs", "truncated", *evaluated)
        return request + of("advantages", "returns"), read
    rows = of(*inputs, "responses", "response_mask")
    updates = rows + of("old_log_probs", "advantages", "rollout_log_probs")
    updates += critic * (rows + of("values", "returns"))
    received = of(
        *inputs, "prompts", "responses", "response_mask", "rollout_log_probs", "truncated", *evaluated
    )
    return request + (1 + reference + critic) * rows + updates, received


def samples_file(tokens: float, columns: Sequence[str]) -> float:
    """Return the bytes of a samples file with ``tokens`` of responses, and ``columns`` of a number for each.

    A number keeps its significant bits but the first, and sign and exponent in about 3 bits; id and text of
    a token take about 4.5 bytes.
    """
    return tokens * (4.5 + sum(TOKEN_COLUMNS[name] + 2 for name in columns) / 8)


def checkpoint(model: Model) -> float:
    """Return the bytes of the training state: weights and two moments in float32."""
    return 12 * model.parameters


@dataclass(frozen=True)
class Plan:
    """A model, its machines and the layout."""

    title: str
    model: Model
    trainers: int
    """GPUs that train."""
    rollouts: int
    """GPUs that generate; the same ones if ``together``."""
    together: bool
    engine: int
    """GPUs of one engine of vLLM (``tensor_model_parallel_size``)."""
    samples: int
    tensor: int = 1
    stages: int = 1
    expert: int = 1
    """Ranks that share the experts."""
    prompt: int = 512
    response: int = 8192
    """Longest response; lengths are even between 0 and it."""
    updates: int = 4
    """Optimizer steps of an iteration."""

    @property
    def micro(self) -> int:
        """Tokens of a micro-batch of one rank, or of the ranks that share a copy of the model.

        The cap that a run chooses on GPUs with room for it (``strop.config.memory.choices``).
        """
        return max(MOST_ON_A_GPU, self.prompt + self.response)

    @property
    def tokens(self) -> float:
        """Tokens of all samples of an iteration."""
        return self.samples * (self.prompt + self.response / 2)

    @property
    def megatron(self) -> bool:
        """True for megatron-core's layout, False for FSDP2."""
        return self.tensor * self.stages * self.expert > 1


PLANS = [
    Plan(
        "7B on 8",
        Model(
            "Qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
        ),
        trainers=8, rollouts=8, together=True, engine=1, samples=1024,
    ),
    Plan(
        "70B on 64",
        Model(
            "Llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        ),
        trainers=64, rollouts=64, together=True, engine=8, samples=2048,
    ),
    Plan(
        "235B-A22B on 512",
        Model(
            "Qwen3Moe", hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1536, tie_word_embeddings=False,
        ),
        trainers=256, rollouts=256, together=False, engine=8, samples=4096,
        tensor=4, stages=2, expert=32,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Bytes, by one rank unless said otherwise, and seconds of an iteration."""

    bytes: float
    seconds: float


def between(size: float, ranks: int) -> float:
    """Return the seconds in which each of ``ranks`` sends ``size`` bytes in rings.

    Rings of several nodes cross a node's border through all of its ports at once, so a rank of a whole node
    has as many ports as GPUs: the slower of NVLink and the node's ports.
    """
    return size / (NVLINK if ranks <= NODE else min(NVLINK, NODE * NETWORK))


def decoding(plan: Plan) -> Cost:
    """Return what one GPU reads while its engine generates, in 16 bits: weights and the samples' cache.

    All samples of an engine run at once and end evenly, so after t of T steps 1 - t / T are left.
    """
    at_once = plan.samples / (plan.rollouts / plan.engine)
    model, steps = plan.model, plan.response
    unused = (1 - model.chosen / model.experts) ** at_once if model.experts else 0
    weights = 2 * (model.parameters - unused * model.routed) * steps
    cache = at_once * model.cache * (plan.prompt * steps / 2 + steps**2 / 6)
    read = weights / plan.engine + cache / min(plan.engine, model.config.num_key_value_heads)
    return Cost(read, read / MEMORY)


def products(plan: Plan, factor: int) -> Cost:
    """Return the seconds of products, ``factor`` operations for each active parameter and token."""
    return Cost(0, factor * plan.model.active * plan.tokens / plan.trainers / PRODUCTS)


def micro_batches(plan: Plan) -> float:
    """Return the micro-batches of a rank in an iteration."""
    return plan.tokens / (plan.trainers / (plan.tensor * plan.stages)) / plan.micro


def parameters_and_gradients(plan: Plan) -> Cost:
    """Return what the update sends of parameters and gradients."""
    model, ranks = plan.model, plan.trainers
    if not plan.megatron:
        sent = micro_batches(plan) * fsdp_update(model, ranks)
        return Cost(sent, between(sent, ranks))
    dense = (model.parameters - model.routed) / (plan.tensor * plan.stages)
    routed = model.routed / (plan.expert * plan.stages)
    copies = ranks // (plan.tensor * plan.stages)
    sent = plan.updates * megatron_step(dense, routed, copies, ranks // (plan.expert * plan.stages))
    return Cost(sent, sent / NETWORK)  # the ranks of such a group are on different nodes


def tokens_for_fsdp(plan: Plan) -> float:
    """Return the tokens of a micro-batch whose products take as long as FSDP2's messages."""
    seconds = between(fsdp_update(plan.model, plan.trainers), plan.trainers)
    return seconds * PRODUCTS / (8 * plan.model.active)


def activations(plan: Plan) -> Cost:
    """Return what the update sends of activations, inside a node."""
    return _activations(plan, tensor_parallel)


def _activations(plan: Plan, of_micro_batch: Callable[[Model, int, int, int], float]) -> Cost:
    if not plan.megatron:
        return Cost(0, 0)
    each = of_micro_batch(plan.model, plan.micro, plan.micro, plan.tensor) / plan.stages
    sent = micro_batches(plan) * (each + pipeline(plan.model, plan.micro, plan.tensor))
    return Cost(sent, sent / NVLINK)


def experts(plan: Plan, passes: int = 3) -> Cost:
    """Return what is sent to experts and back; between nodes, each GPU through its own port."""
    if not plan.model.experts or not plan.megatron:
        return Cost(0, 0)
    layers = plan.model.config.num_hidden_layers // plan.stages
    each = to_experts(plan.model, plan.micro // plan.tensor, plan.expert, layers)
    outside = max(plan.expert - NODE, 0) / (plan.expert - 1)
    sent = micro_batches(plan) * passes * each
    return Cost(sent, max(sent * outside / NETWORK, sent * (1 - outside) / NVLINK))


def log_prob_messages(plan: Plan) -> Cost:
    """Return what a pass without gradient over all samples sends."""
    if not plan.megatron:
        sent = micro_batches(plan) * fsdp_pass(plan.model, plan.trainers)
        return Cost(sent, between(sent, plan.trainers))
    parts = [_activations(plan, tensor_parallel_pass), experts(plan, passes=1)]
    return Cost(sum(part.bytes for part in parts), sum(part.seconds for part in parts))


def weights(plan: Plan, transport: str) -> Cost:
    """Return what leaves rank zero, or what each rank sends if all gather for themselves."""
    whole = 2 * plan.model.parameters
    if transport == "gathered" and plan.megatron:  # always apart here
        return Cost(0, 0)
    if transport == "gathered":
        sent = gathered_weights(plan.model, plan.trainers)
        return Cost(sent, between(sent, plan.trainers))
    if transport == "broadcast":  # a ring: every node passes on what it receives
        return Cost(whole, whole / NETWORK)
    # every node fetches from rank zero's until others have it: copies double
    rounds = (plan.rollouts // NODE).bit_length()
    return Cost(whole * (plan.rollouts // NODE), whole * rounds / OBJECT_STORE)


def driver(plan: Plan, *, handles: bool) -> Cost:
    """Return the bytes of columns through the driver (GRPO without a reference), and its CPU seconds."""
    sent, received = through_driver(plan.prompt, plan.response, 8, handles=handles)
    size = plan.samples * (sent + received)
    ranks = plan.trainers + (0 if plan.together else plan.rollouts)
    return Cost(size, size / OBJECT_STORE + ranks * DRIVER_CALL)


def rows() -> list[tuple[str, list[Cost]]]:
    """Return the lines of the first table."""
    transfers = [
        ("weights to a rollout in the same processes, gathered by all", "gathered"),
        ("weights to a separate pool, by broadcast", "broadcast"),
        ("the same through Ray's object store", "object store"),
    ]
    return [
        ("generation: weights and cache read by a GPU", [decoding(plan) for plan in PLANS]),
        ("log-probs: products", [products(plan, 2) for plan in PLANS]),
        ("log-probs: messages", [log_prob_messages(plan) for plan in PLANS]),
        ("update: products, with recomputed layers", [products(plan, 8) for plan in PLANS]),
        ("update: parameters and gradients", [parameters_and_gradients(plan) for plan in PLANS]),
        ("update: activations between ranks of a node", [activations(plan) for plan in PLANS]),
        ("update: tokens to experts", [experts(plan) for plan in PLANS]),
        *((title, [weights(plan, kind) for plan in PLANS]) for title, kind in transfers),
        ("columns through the driver", [driver(plan, handles=True) for plan in PLANS]),
        ("the same with `trainer.handles=False`", [driver(plan, handles=False) for plan in PLANS]),
        (
            "samples file",
            [
                Cost(size, size / DISK)
                for size in (samples_file(p.samples * p.response / 2, RECORDED) for p in PLANS)
            ],
        ),
        (
            "checkpoint, all ranks",
            [
                Cost(size, size / DISK / -(-p.trainers // NODE))
                for p in PLANS
                for size in [checkpoint(p.model)]
            ],
        ),
    ]


def tables() -> str:
    """Return the generated part of the page."""
    lines = ["| an iteration | " + " | ".join(f"{plan.title} GPUs" for plan in PLANS) + " |"]
    lines += ["| --- |" + " ---: |" * len(PLANS)]
    lines += [f"| samples | {' | '.join(f'{plan.samples:,}' for plan in PLANS)} |"]
    lines += [f"| tokens of a micro-batch | {' | '.join(f'{plan.micro:,}' for plan in PLANS)} |"]
    lines += [f"| {title} | {' | '.join(map(_cell, costs))} |" for title, costs in rows()]
    least = " | ".join(f"{round(tokens_for_fsdp(plan), -2):,.0f} tokens" for plan in PLANS)
    lines += [f"| micro-batch whose products take as long as FSDP2's messages | {least} |"]
    return "\n".join(lines)


def _cell(cost: Cost) -> str:
    if not cost.seconds:
        return ""
    seconds = f"{cost.seconds:.0f} s" if cost.seconds >= 10 else f"{cost.seconds:.2g} s"
    if not cost.bytes:
        return seconds
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if cost.bytes >= size:
            return f"{cost.bytes / size:.3g} {unit}, {seconds}"
    return seconds


if __name__ == "__main__":
    sys.exit(write_or_check(__file__, tables(), sys.argv[1:]))

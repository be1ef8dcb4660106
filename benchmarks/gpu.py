"""Check and measure strop on a GPU, in one command and a few minutes.

    python benchmarks/gpu.py [--budget 540] [--models 0.5B 1.5B 7B] [--out benchmarks/results/gpu_DATE]

First rightness: log-probs and gradients on the GPU against the CPU's, packed rows and shared prompts against
padded rows, each setting that changes the update's passes, the output layer against whole logits and float64,
bfloat16 against float32, and the log-probs of the hf rollout against a forward pass. Then speed: the output
layer alone, with Triton's kernels and with torch's operations; generation, log-probs and update of random
models with Qwen2.5's sizes, beside a plain training step of transformers on the same tokens (the floor);
generation by vLLM where it is installed, in a separate process, and its weights and log-probs after a sleep;
whole steps of GRPO and of PPO by `strop.train`, from prompts to updated weights, with a reward function and,
for PPO, reference and critic; and the update again, with one setting changed at a time. Needs no network and
no data. Cases that fail or that the budget (seconds) leaves out are named, and every row is written at once.
A model whose training does not fit into the memory is trained with fewer layers, which are named with the
output layer's share of the operations: "7B, 9 of 28 layers, head 31%".

MFU counts 6 operations a parameter and trained token (2 without gradient) and the attention's, each prompt
once for all of its samples, relative to the card's published peak, as peers do, and, as "of measured", to its
own speed in a matrix product of 8192 x 8192 in the same run. Tokens per second of an update and of log-probs
count the prompt of every sample, those of generation new tokens only. Comparisons stop at two fifths of the
budget; what is under way 15 seconds after its end is given up. Without a GPU everything runs on the CPU with
a tiny model, as a test of this program.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from strop.algorithms import output_layer
from strop.algorithms.logprobs import token_log_probs
from strop.algorithms.output_layer import OutputLayer
from strop.controller.rendezvous import LOOPBACK, open_store
from strop.engines.base import Loss, OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.engines.torch.sharding import ShardingSettings
from strop.files import atomic_write_text
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.flex_attention import FLEX
from strop.models.passes.compiled import reason_not_compiled
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.rollout.base import RolloutEngine, SamplingParams
from strop.rollout.hf.engine import HFRollout
from strop.rollout.hf.replica import _replace_parameters
from strop.rollout.transfer.broadcast import Channel
from strop.rollout.weights import checksums, require_equal_checksums
from strop.torch_private import set_allocator

BUDGET = "GPU_BUDGET_S"
PUBLISHED = (
    ("prime-rl", "update, 4B, 8 GPUs", 0.36),
    ("prime-rl", "update, 0.6B", 0.11),
)
"""Model FLOPs utilisation that peers report for their trainers."""
PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}
"""Operations a second in bfloat16 without sparsity that data sheets give, by a part of the card's name."""


SHARE_OF_COMPARISONS = 0.4
"""Of the budget, from which on speed is measured."""

OVER_S = 15
"""Seconds for which a measurement may go on after the end of the budget."""

STEPS = 4
"""Of a run of ``strop.train``; the first, which compiles and allocates, is not measured."""

PARTS = ("gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "sync_weights")
"""Of a step, of those that ``strop.train`` times."""

Line = dict[str, Any]
"""A row of the table: title -> figure or text."""

Comparison = tuple[str, float, float]
"""What is compared, the difference and its bound."""


@dataclass(frozen=True)
class Size:
    """Sizes of a random Qwen2."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    tied: bool = True

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=32_768,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )

    def parameters(self) -> int:
        with torch.device("meta"):
            return Qwen2ForCausalLM(self.config()).num_parameters()

    def fitting(self, memory: float, tokens: int) -> Size:
        """Return this size with as many layers as can be trained on ``tokens`` at once in ``memory`` bytes.

        A parameter takes 18 bytes (float32 weight, gradient and two moments, a copy in 16 bits), a token in a
        layer about 8 hidden states and 4 of the MLP's, and an eighth of the memory is left.
        """
        none, one = (replace(self, layers=layers).parameters() for layers in (0, 1))
        layer = 18 * (one - none) + 2 * tokens * (8 * self.hidden + 4 * self.intermediate)
        return replace(self, layers=max(min(self.layers, int((memory * 7 / 8 - 18 * none) / layer)), 0))


SIZES = {
    "tiny": Size(64, 128, 2, 2, 1, 512),
    "0.5B": Size(896, 4864, 24, 14, 2),
    "1.5B": Size(1536, 8960, 28, 12, 2),
    "7B": Size(3584, 18_944, 28, 28, 4, 152_064, tied=False),
}
EXPANDABLE = "expandable_segments:True"
ON_POLICY = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages")


@dataclass
class Clock:
    """Time and memory on ``device``."""

    device: torch.device
    ends: float

    def left(self) -> float:
        """Return the seconds of the budget that are left."""
        return self.ends - time.perf_counter()

    def seconds(self, work: Callable[[], object], rounds: int = 3) -> float:
        """Return the median seconds of a call, after one to warm up."""
        found = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def card(self) -> str:
        """Return the name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def forget(self) -> None:
        """Free what is unused, and reset the peak of memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Return the peak of allocated memory in GiB since ``forget``; NaN on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else math.nan


def build(size: Size, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(size.config()).eval()


def words(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ``i`` is the word ``w<i>``; 0 pads, 1 ends."""
    made = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")


def varied(response: str) -> float:
    """Score a response by its letters, so that samples of a prompt differ."""
    return len(response) % 10 / 10


def batch_of(prompts: int, n: int, prompt: int, response: int, vocabulary: int, *, uneven: bool) -> DataProto:
    """Return ``prompts`` x ``n`` samples; uneven lengths are between a quarter and all of the columns."""
    chance = torch.Generator().manual_seed(1)

    def lengths(count: int, most: int) -> Tensor:
        if not uneven:
            return torch.full((count,), most)
        return torch.randint(max(most // 4, 1), most + 1, (count,), generator=chance)

    of_prompt = lengths(prompts, prompt).repeat_interleave(n)
    of_response = lengths(prompts * n, response)
    prompt_mask = torch.arange(prompt) >= prompt - of_prompt[:, None]
    response_mask = torch.arange(response) < of_response[:, None]
    mask = torch.cat([prompt_mask, response_mask], 1).long()
    ids = torch.randint(2, vocabulary, (prompts, prompt), generator=chance).repeat_interleave(n, 0)
    responses = torch.randint(2, vocabulary, (prompts * n, response), generator=chance)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([ids, responses], 1) * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "responses": responses * response_mask,
            "response_mask": response_mask.float(),
            "advantages": torch.randn(prompts * n, response, generator=chance) * response_mask,
        }
    )


def engine_of(
    size: Size,
    device: torch.device,
    dtype: str,
    *,
    packed: bool,
    trains: bool = True,
    attention: str = "sdpa",
    sharding: ShardingSettings | None = None,
    **options: Any,
) -> TorchEngine:
    """Build an engine, with ``sharding`` over the process group; ``options`` are those of the engine."""
    settings = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)
    model, weights = build(size, device), None
    if sharding is not None:
        weights = InMemory({name: weight.detach() for name, weight in model.named_parameters()})
        _replace_parameters(model, lambda weight: weight.to("meta"))
        model.requires_grad_()
    model.config._attn_implementation = attention
    module = PolicyModel(model, packed=packed)
    return TorchEngine(
        module,
        device=device,
        compute_dtype=dtype,
        optimizer=settings if trains else None,
        sharding=sharding,
        weights=weights,
        **options,
    )


@dataclass(frozen=True)
class InMemory:
    """Weights of a model to shard."""

    weights: dict[str, Tensor]
    readable: bool = True

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Generator[None]:
    """Make this process the only rank of a process group, over which FSDP2 can shard."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def policy_loss(tokens: float) -> Loss:
    def loss(outputs: dict[str, Tensor], columns: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        entropy = outputs["entropy"].sum() * 1e-3
        return -((columns["advantages"] * outputs["log_prob"]).sum() + entropy) / tokens, {}

    return loss


def gradients(engine: TorchEngine, batch: DataProto, micro: MicroBatching) -> dict[str, Tensor]:
    engine.forward_backward(batch, policy_loss(float(batch.batch["response_mask"].sum())), micro)
    named = engine.module.named_parameters()
    return {name: weight.grad.double().cpu() for name, weight in named if weight.grad is not None}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference relative to the largest number."""
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    differences = [(found[name] - tensor).abs().max() for name, tensor in wanted.items()]
    return float(torch.stack(differences).max()) / largest  # Python's max would drop a NaN


def compare(
    name: str, bounds: Mapping[str, float], differences: Callable[[], Iterable[float]]
) -> Iterator[Comparison]:
    """Yield a line for each of ``bounds``; from an error on, which becomes a part of the name, NaNs."""
    found: list[float] = []
    try:
        for difference in differences():
            found.append(difference)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the rest can be measured
        name = f"{name}: {in_a_line(error)}"
    found += [math.nan] * (len(bounds) - len(found))
    for (what, bound), difference in zip(bounds.items(), found, strict=True):
        yield f"{name}: {what}", difference, bound


def rightness(device: torch.device) -> Iterator[Comparison]:
    """Compare what ``__doc__`` lists: log-probs in nats, gradients relative to the largest."""
    size = Size(128, 256, 3, 4, 2, 2048)
    batch = batch_of(6, 4, 24, 40, size.vocabulary, uneven=True)
    whole, split = MicroBatching(), MicroBatching(max_tokens=400)
    cpu = engine_of(size, torch.device("cpu"), "float32", packed=False)
    wanted = cpu.infer(batch, whole)["log_prob"]
    wanted_gradients = gradients(cpu, batch, whole)

    def update(
        name: str, dtype: str, *, packed: bool = True, micro: MicroBatching = split, **options: Any
    ) -> Iterator[Comparison]:
        def differences() -> Iterator[float]:
            engine = engine_of(size, device, dtype, packed=packed, **options)
            engine.module.load_state_dict(cpu.module.state_dict())
            yield float((engine.infer(batch, micro)["log_prob"] - wanted).abs().max())
            yield apart(gradients(engine, batch, micro), wanted_gradients)

        bound = 1e-4 if dtype == "float32" else 0.1
        return compare(name, {"log-probs": bound, "gradients": bound}, differences)

    yield from update("float32, padded, against the CPU", "float32", packed=False, micro=whole)
    yield from update("float32, packed, shared prompts, split", "float32")
    yield from update("bfloat16, packed, against float32 on the CPU", "bfloat16")
    on_gpu, selective = device.type == "cuda", {"gradient_checkpointing": "selective"}
    settings: dict[str, dict[str, Any]] = {
        "checkpointing": {"gradient_checkpointing": True},
        "selective checkpointing": selective,
    }
    if on_gpu:  # there is nothing to offload on a CPU
        settings["offloaded"] = {"offload_parameters": True, "offload_moments": True}
    if on_gpu and not reason_not_compiled(device):
        settings |= {"compiled layers": {"compiled": True}, "FlexAttention": {"attention": FLEX}}
        settings["FlexAttention, selective checkpointing"] = {"attention": FLEX, **selective}
    for (name, options), dtype in itertools.product(settings.items(), ("float32", "bfloat16")):
        yield from update(f"{dtype}, packed, {name}", dtype, **options)
    head = "output layer in blocks against whole logits"
    yield from compare(head, {"gradients": 1e-5}, partial(_head, device))
    for name in ("kernel", "blocks") if _has_kernel(device) else ("blocks",):
        with head_by(name):
            yield from compare(
                f"output layer, bfloat16, {name}, against float64",
                {"log-probs": 1e-3, "gradients": 1e-2},
                partial(_head_in_bfloat16, device),
            )
    log_probs = {"log-probs against a forward pass": 1e-4}
    yield from compare("hf rollout", log_probs, partial(_rollout, size, device))
    if not on_gpu or torch.cuda.device_count() > 1:  # NCCL needs a GPU for each rank
        yield from compare("weights by broadcast", {"weights that differ": 0}, partial(_broadcast, device))


def _head(device: torch.device) -> Iterator[float]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 128, device=device), torch.randn(5000, 128, device=device) / 11
    ids, upstream = torch.randint(5000, (300,), device=device), torch.randn(300, device=device)
    found = []
    for project in (OutputLayer, lambda head: lambda states: states @ head.t()):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        result = token_log_probs(leaves[0], project(leaves[1]), ids, temperature=0.7)
        ((result.log_probs_N + 0.1 * result.entropy_N) * upstream).sum().backward()
        found.append({str(place): leaf.grad.double() for place, leaf in enumerate(leaves)})
    yield apart(*found)


def _head_in_bfloat16(device: torch.device) -> Iterator[float]:
    """Yield the mean difference of log-probs and that of gradients from float64 with rounded logits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 128).bfloat16(), (torch.randn(5000, 128) / 11).bfloat16()
    ids, upstream = torch.randint(5000, (300,)), torch.randn(300)
    leaves = [tensor.detach().to(device).requires_grad_() for tensor in (hidden, weight)]
    result = token_log_probs(leaves[0], OutputLayer(leaves[1]), ids.to(device), temperature=0.7)
    ((result.log_probs_N + 0.1 * result.entropy_N) * upstream.to(device)).sum().backward()
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    products = exact[0] @ exact[1].t()
    products = products + (products.bfloat16().double() - products).detach()
    log_p = (products / 0.7).log_softmax(-1)
    log_probs = log_p.gather(1, ids[:, None])[:, 0]
    ((log_probs - 0.1 * (log_p.exp() * log_p).sum(-1)) * upstream).sum().backward()
    found, wanted = (
        {str(place): tensor.grad.double().cpu() for place, tensor in enumerate(tensors)}
        for tensors in (leaves, exact)
    )
    yield float((result.log_probs_N.cpu() - log_probs).detach().abs().mean())
    yield apart(found, wanted)


def _has_kernel(device: torch.device) -> bool:
    return output_layer._has_kernel(device, torch.bfloat16)


@contextlib.contextmanager
def head_by(name: str) -> Generator[None]:
    """Compute the output layer by the ``kernel``, where there is one, or in ``blocks``."""
    kept = output_layer._has_kernel
    if name == "blocks":
        output_layer._has_kernel = lambda device, dtype: False
    try:
        yield
    finally:
        output_layer._has_kernel = kept


def _rollout(size: Size, device: torch.device) -> Iterator[float]:
    engine = engine_of(size, device, "float32", packed=True, trains=False)
    rollout = HFRollout(engine.module.hugging_face_model, pad_token_id=0, eos_token_ids=[1])
    batch = rollout.generate(_prompts(size, 8, 16, 4), SamplingParams(max_tokens=32, n=4)).to("cpu")
    again = engine.infer(batch, MicroBatching())["log_prob"]
    yield float(((again - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]).abs().max())


def _broadcast(device: torch.device) -> Iterator[float]:
    places = [device] * 2 if device.type == "cpu" else [torch.device("cuda", rank) for rank in range(2)]
    store, port = open_store(LOOPBACK)
    weights = [(str(rows), torch.randn(rows, 64, device=places[0]).bfloat16()) for rows in range(1, 50)]

    def receive() -> int:
        if device.type == "cuda":
            torch.cuda.set_device(places[1])  # of this thread
        found = dict(Channel.to_sender(LOOPBACK, port, 1, 2, places[1]).receive())
        return sum(not torch.equal(found[name].cpu(), weight.cpu()) for name, weight in weights)

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        Channel(store, 0, 2, places[0]).send(weights, max_bytes=30_000)
        yield receiving.result()


def _prompts(size: Size, count: int, width: int, n: int) -> DataProto:
    ids = torch.randint(2, size.vocabulary, (count, width), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": mask.cumsum(1) - 1,
            "seeds": torch.arange(count * n).view(count, n),
        }
    )


def matrix_speed(clock: Clock, dtype: torch.dtype) -> float:
    """Return the operations a second of a large matrix product."""
    size = 8192 if clock.device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    return 2 * size**3 / clock.seconds(lambda: left @ right, rounds=10)


def operations(size: Size, parameters: int, batch: DataProto, n: int, *, trains: bool) -> float:
    """Count the operations of a pass over the samples of ``batch``: each prompt once, logits of responses."""
    mask, of_response = batch.batch["attention_mask"], batch.batch["response_mask"].sum(1).double()
    of_prompt = mask.sum(1).double() - of_response
    prompts = of_prompt[::n]
    head = size.vocabulary * size.hidden
    body = parameters - head * (1 if size.tied else 2)
    attended = (prompts**2).sum() / 2 + (of_response * of_prompt + of_response**2 / 2).sum()
    forward = 2 * body * (prompts.sum() + of_response.sum()) + 2 * head * of_response.sum()
    return float(forward + 4 * size.layers * size.hidden * attended) * (3 if trains else 1)


class Floor:
    """A plain step of transformers: bfloat16 weights, sdpa, equal lengths, whole logits, fused AdamW."""

    def __init__(self, size: Size, batch: DataProto, device: torch.device, rows: int) -> None:
        self.model = build(size, device).to(torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.pieces = [
            {name: batch.batch[name][start : start + rows].to(device) for name in ON_POLICY}
            for start in range(0, len(batch), rows)
        ]

    def update(self) -> None:
        for piece in self.pieces:
            width = piece["responses"].shape[1]
            logits = self.model(
                input_ids=piece["input_ids"], use_cache=False, logits_to_keep=width + 1
            ).logits
            log_probs = (
                logits[:, :-1].float().log_softmax(-1).gather(2, piece["responses"][..., None])[..., 0]
            )
            (-(piece["advantages"] * log_probs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


TITLES = ("model", "phase", "lengths", "s", "tokens/s", "MFU", "of measured", "GiB", "note")


def published_peak(card: str) -> float:
    """Return the operations a second of the first of ``PEAKS`` in the card's name; NaN if it has none."""
    return next((peak for name, peak in PEAKS.items() if name in card), math.nan)


def row(line: Line) -> str:
    def cell(name: str) -> str:
        value = line.get(name, "")
        if not isinstance(value, float):
            return str(value)
        return "" if math.isnan(value) else f"{value:,.0f}" if name == "tokens/s" else f"{value:.3f}"

    return f"| {' | '.join(cell(name) for name in TITLES)} |"


def in_a_line(error: Exception) -> str:
    """Return kind and first line of an error, as the text of a cell."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[:200].replace('|', '/')}"


@dataclass
class Table:
    """Rows, which are printed and written as they come."""

    lines: list[Line]
    write: Callable[[], None] = lambda: None

    def add(self, line: Line) -> None:
        self.lines.append(line)
        print(row(line), flush=True)
        self.write()

    @contextlib.contextmanager
    def or_error(self, line: Line) -> Generator[None]:
        """Add ``line`` with the error if the body raises one, in place of the rows that it would add."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self.add(line | {"note": "out of memory"})
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the rest can be measured
            self.add(line | {"note": f"failed: {in_a_line(error)}"})


@dataclass
class Case:
    """One model and its samples."""

    name: str
    size: Size
    clock: Clock
    matrix_speed: float
    table: Table

    def __post_init__(self) -> None:
        on_gpu = self.clock.device.type == "cuda"
        self.prompts, self.n, self.width = (8, 8, 512) if on_gpu else (2, 2, 16)
        self.micro = MicroBatching(max_tokens=8192 if on_gpu else 128)
        self.parameters = self.size.parameters()
        self.batches = {
            kind: batch_of(
                self.prompts, self.n, self.width, self.width, self.size.vocabulary, uneven=kind == "uneven"
            )
            for kind in ("full", "uneven")
        }

    def measure(
        self,
        phase: str,
        work: Callable[[], object],
        *,
        batch: DataProto,
        lengths: str = "full",
        n: int | None = None,
        count: float | None = None,
        trains: bool = False,
    ) -> None:
        """Add a line; ``n`` samples share a prompt, ``count`` tokens are counted (default: all real ones)."""
        line: Line = {"model": self.name, "phase": phase, "lengths": lengths}
        if self.clock.left() < 0:
            self.table.add(line | {"note": "not run: budget"})
            return
        self.clock.forget()
        with self.table.or_error(line):
            took = self.clock.seconds(work)
            count = count or float(batch.batch["attention_mask"].sum())
            flops = operations(self.size, self.parameters, batch, n or self.n, trains=trains)
            figures = {
                "s": took,
                "tokens/s": count / took,
                "MFU": flops / took / published_peak(self.clock.card()),
                "of measured": flops / took / self.matrix_speed,
                "GiB": self.clock.peak(),
            }
            self.table.add(line | figures)

    def that_fits(self) -> Case:
        """Return the case with as many layers as can be trained on this device."""
        if self.clock.device.type == "cpu":
            return self
        return self.cut(self.size.fitting(torch.cuda.mem_get_info()[1], self.micro.max_tokens))

    def cut(self, size: Size) -> Case:
        """Return the case with fewer layers, which its name tells with the output layer's share."""
        if size == self.size:
            return self
        case, batch = replace(self, size=size), self.batches["full"]
        head = 6 * size.vocabulary * size.hidden * float(batch.batch["response_mask"].sum())
        share = head / operations(size, case.parameters, batch, self.n, trains=True)
        return replace(
            case, name=f"{self.name}, {size.layers} of {self.size.layers} layers, head {share:.0%}"
        )

    def inference(self) -> None:
        """Measure generation and log-probs."""
        with self.table.or_error({"model": self.name, "phase": "generation (hf)"}):
            engine = engine_of(self.size, self.clock.device, "bfloat16", packed=True, trains=False)
            model = engine.module.hugging_face_model
            rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[1], compute_dtype=engine.compute_dtype)
            self.generation("hf", rollout)
            for kind, batch in self.batches.items():
                work = partial(engine.infer, batch, self.micro)
                self.measure("log-probs", work, batch=batch, lengths=kind)

    def generation(self, name: str, rollout: RolloutEngine) -> None:
        """Measure the generation of a quarter of the columns, from prompts of as many."""
        new = self.width // 4
        request = _prompts(self.size, self.prompts, new, self.n)
        params = SamplingParams(max_tokens=new, n=self.n, ignore_eos=True)
        self.measure(
            f"generation ({name})",
            lambda: rollout.generate(request, params),
            batch=batch_of(self.prompts, self.n, new, new, self.size.vocabulary, uneven=False),
            count=self.prompts * self.n * new,
        )

    def vllm_here(self) -> None:
        """Measure vLLM's generation as strop sets it up, and the transfer of the weights to it."""
        from strop.rollout.vllm.engine import VLLMRollout

        device, on_gpu = self.clock.device, self.clock.device.type == "cuda"
        model = build(self.size, device).to(torch.bfloat16)
        self.clock.forget()  # the float32 weights: vLLM counts what is reserved
        with tempfile.TemporaryDirectory() as folder:
            self.size.config().save_pretrained(folder)
            arguments = {
                "model": folder,
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "load_format": "dummy",
                "max_model_len": 2 * self.width,
                "max_num_seqs": self.prompts * self.n,
                "max_num_batched_tokens": 8192,
                "enforce_eager": not on_gpu,
                "enable_sleep_mode": on_gpu,
                **({"gpu_memory_utilization": 0.6} if on_gpu else {"kv_cache_memory_bytes": 64 << 20}),
            }
            rollout = VLLMRollout(model, arguments, device=device, pad_token_id=0, eos_token_ids=[1])
        took = self.clock.seconds(lambda: rollout.update_weights(model.named_parameters()))
        self.table.add({"model": self.name, "phase": "weights to vLLM in the process", "s": took})
        self.generation("vllm", rollout)
        rollout.release()  # sleeps on a GPU, as during an update
        line: Line = {"model": self.name, "phase": "weights to vLLM after sleep"}
        with self.table.or_error(line):
            began = time.perf_counter()
            rollout.update_weights(model.named_parameters())
            line["s"] = time.perf_counter() - began
            layout = CheckpointLayout(model)
            expected = checksums(layout.convert(model.named_parameters()), torch.bfloat16)
            require_equal_checksums(expected, rollout.checksums(), 0)
            params = SamplingParams(max_tokens=16, n=2, ignore_eos=True)
            batch = rollout.generate(_prompts(self.size, 4, 16, 2), params).to("cpu")
            policy = TorchEngine(PolicyModel(model), device=device, compute_dtype="bfloat16")
            again = policy.infer(batch, MicroBatching())["log_prob"]
            mean = float((again - batch.batch["rollout_log_probs"]).abs().mean())
            self.table.add(line | {"note": f"weights equal; log-probs differ by {mean:.3f} on average"})

    def vllm(self) -> None:
        """Run ``vllm_here`` in a separate process, which frees vLLM's memory at its end."""
        self.by_itself("vllm", "generation (vllm)", needs="vllm")

    def steps(self) -> None:
        """Run ``step_here`` for each algorithm, in processes of their own."""
        for algorithm in ("grpo", "ppo"):
            self.by_itself(algorithm, f"{algorithm.upper()} step", needs="pydantic")

    def by_itself(self, part: str, phase: str, *, needs: str) -> None:
        """Run ``part`` in a process of its own, until the budget ends."""
        line: Line = {"model": self.name, "phase": phase}
        missing = "" if find_spec(needs) else "not installed" if needs == part else f"no {needs}"
        why_not = "budget" if self.clock.left() < 0 else missing
        if why_not:
            self.table.add(line | {"note": f"not run: {why_not}"})
            return
        self.clock.forget()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines.json"
            left = max(self.clock.left(), 1)
            command = [sys.executable, __file__, "--budget", str(left)]
            command += ["--part", part, self.name, str(self.matrix_speed), str(out)]
            try:
                child = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                self.table.add(line | {"note": "not finished: budget"})
                return
            if child.returncode:
                *_, why = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
                self.table.add(line | {"note": f"failed: {why.replace('|', '/')}"})
                return
            for found in json.loads(out.read_text()):
                self.table.add(found)

    def step_here(self, algorithm: str) -> None:
        """Measure steps of a run, as a user starts it, with as many layers as fit.

        A step of PPO trains two models and holds the reference; vLLM has memory of its own.
        """
        if self.clock.device.type == "cuda":
            memory = torch.cuda.mem_get_info()[1] * (0.25 if algorithm == "ppo" else 0.6)
            self.cut(self.size.fitting(memory, self.micro.max_tokens)).step(algorithm)
        else:
            self.step(algorithm)

    def step(self, algorithm: str) -> None:
        """Add the median step, with its parts."""
        import strop  # not at the top: the other cases need neither pydantic nor hydra

        line: Line = {"model": self.name, "phase": f"{algorithm.upper()} step", "lengths": "full"}
        if not self.size.layers:
            self.table.add(line | {"note": "not run: memory"})
            return
        samples, n = self.prompts * self.n, self.n if algorithm == "grpo" else 1
        draw = random.Random(0)
        rows = [
            {"prompt": " ".join(f"w{draw.randrange(2, self.size.vocabulary)}" for _ in range(self.width))}
            for _ in range(STEPS * samples // n)
        ]
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model")
            build(self.size, self.clock.device).to(torch.bfloat16).save_pretrained(model)
            words(self.size.vocabulary).save_pretrained(model)
            self.clock.forget()
            keys: dict[str, Any] = {
                "data.train_batch_size": samples // n,
                "data.max_prompt_length": self.width,
                "data.max_response_length": self.width,
                "data.apply_chat_template": False,
                "algorithm.adv_estimator": "grpo" if algorithm == "grpo" else "gae",
                "algorithm.kl_ctrl.kl_coef": 0.0 if algorithm == "grpo" else 0.001,
                "actor_rollout_ref.rollout.n": n,
                "actor_rollout_ref.rollout.ignore_eos": True,
                "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
                "actor_rollout_ref.actor.ppo_mini_batch_size": samples // n,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": self.micro.max_tokens,
                "critic.ppo_max_token_len_per_gpu": self.micro.max_tokens,
                "trainer.n_gpus_per_node": 1,  # as the other rows, which also need no Ray
                "trainer.total_training_steps": STEPS,
                "trainer.default_local_dir": str(Path(folder, "run")),
                "trainer.save_minutes": None,
            }
            run = strop.train(str(model), rows, varied, **keys)
            steps = run.metrics[1:]

        def median(name: str) -> float:
            return statistics.median(step[name] for step in steps)

        parts = [name for name in PARTS if f"timing_s/{name}" in steps[0]]
        spent = ", ".join(f"{name} {median(f'timing_s/{name}'):.3f}" for name in parts)
        speed = {"s": median("timing_s/step"), "tokens/s": median("perf/throughput")}
        self.table.add(line | speed | {"note": f"s: {spent}"})

    def training(self) -> None:
        """Measure the update, and its floor; each frees its model at its end."""
        if not self.size.layers:
            self.table.add({"model": self.name, "phase": "update", "note": "not run: memory"})
            return
        self.update("update", self.batches)
        why_not = reason_not_compiled(self.clock.device) if self.clock.device.type == "cuda" else "no GPU"
        self.variant("compiled layers", why_not=why_not, compiled=True)
        self.floor()
        self.update("update, checkpointing", self.batches, gradient_checkpointing=True)

    def update(
        self,
        phase: str,
        batches: Mapping[str, DataProto],
        *,
        n: int | None = None,
        micro: MicroBatching | None = None,
        packed: bool = True,
        **options: Any,
    ) -> None:
        """Measure optimizer steps over all samples of each batch; ``options`` are those of ``engine_of``."""
        with self.table.or_error({"model": self.name, "phase": phase}):
            engine = engine_of(self.size, self.clock.device, "bfloat16", packed=packed, **options)
            for kind, batch in batches.items():
                loss = policy_loss(float(batch.batch["response_mask"].sum()))

                def step(batch: DataProto = batch, loss: Loss = loss) -> None:
                    engine.forward_backward(batch, loss, micro or self.micro)
                    engine.optimizer_step(1e-6)

                self.measure(phase, step, batch=batch, lengths=kind, n=n, trains=True)

    def variants(self) -> None:
        """Measure the update with one thing else each; FSDP2 over one rank copies, and sends nothing."""
        if not self.size.layers:
            return
        device, on_gpu = self.clock.device, self.clock.device.type == "cuda"
        apart = batch_of(self.prompts * self.n, 1, self.width, self.width, self.size.vocabulary, uneven=True)
        self.variant("segments of fixed size", setting="expandable_segments:False")
        self.variant("8 rows a pass", micro=MicroBatching(rows=8))
        self.variant("padded", packed=False)
        self.variant("no shared prompts", batch=apart, n=1)
        self.variant("selective checkpointing", gradient_checkpointing="selective")
        why = "" if on_gpu else "no GPU"
        self.variant("offloaded", why_not=why, offload_parameters=True, offload_moments=True)
        why = why or reason_not_compiled(device)
        self.variant("FlexAttention", why_not=why, attention=FLEX)
        selective = {"attention": FLEX, "gradient_checkpointing": "selective"}
        self.variant("FlexAttention, selective checkpointing", why_not=why, **selective)
        with group_of_one(device):
            for name, settings in (
                ("FSDP2", ShardingSettings()),
                ("FSDP2, reshard_after_forward=False", ShardingSettings(reshard_after_forward=False)),
                ("FSDP2, use_no_sync_for_gradient_accumulation", ShardingSettings(reduce_once=True)),
            ):
                self.variant(name, sharding=settings)

    def variant(
        self,
        name: str,
        *,
        batch: DataProto | None = None,
        setting: str = EXPANDABLE,
        why_not: str = "",
        **options: Any,
    ) -> None:
        """Measure the update on rows of uneven lengths; ``options`` are those of ``update``."""
        phase = f"update, {name}"
        why_not = why_not or ("budget" if self.clock.left() < 0 else "")
        if why_not:
            self.table.add({"model": self.name, "phase": phase, "note": f"not run: {why_not}"})
            return
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()
            set_allocator(setting)
        self.update(phase, {"uneven": batch or self.batches["uneven"]}, **options)

    def floor(self) -> None:
        """Measure a plain training step of transformers."""
        batch, rows = self.batches["full"], max(self.micro.max_tokens // (2 * self.width), 1)
        phase = "floor: transformers' update"
        with self.table.or_error({"model": self.name, "phase": phase}):
            plain = Floor(self.size, batch, self.clock.device, rows)
            self.measure(phase, plain.update, batch=batch, n=1, trains=True)


def head_speed(clock: Clock, table: Table) -> None:
    """Compare the output layer at a vocabulary of 152k with its matrix products alone."""
    on_gpu = clock.device.type == "cuda"
    tokens, hidden, vocabulary = (8192, 1536, 151_936) if on_gpu else (64, 32, 1024)
    states = torch.randn(tokens, hidden, device=clock.device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=clock.device) / hidden**0.5).to(torch.bfloat16)
    weight.requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=clock.device)
    upstream = torch.randn(vocabulary, tokens, device=clock.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def log_probs() -> None:
        token_log_probs(states, OutputLayer(weight), ids, temperature=1.0)

    def update() -> None:
        result = token_log_probs(states, OutputLayer(weight), ids, temperature=1.0)
        (result.log_probs_N + 1e-3 * result.entropy_N).sum().backward()
        states.grad = weight.grad = None

    @torch.no_grad()
    def one_product() -> None:
        states @ weight.t()

    @torch.no_grad()
    def products() -> None:  # logits, once more in the backward pass, and both gradients
        for _ in range(2):
            one_product()
        upstream.t() @ weight
        upstream @ states

    works = (
        ("log-probs", log_probs, clock.seconds(one_product)),
        ("update", update, clock.seconds(products)),
    )
    for phase, work, products_s in works:
        for name in ("kernel", "blocks"):
            line: Line = {"model": f"V={vocabulary}", "phase": f"output layer, {phase}, {name}"}
            if name == "kernel" and not _has_kernel(clock.device):
                table.add(line | {"note": "not run: no kernel for this device"})
                continue
            clock.forget()
            with table.or_error(line), head_by(name):
                took = clock.seconds(work)
                figures = {"lengths": "full", "s": took, "tokens/s": tokens / took, "GiB": clock.peak()}
                table.add(line | figures | {"note": f"{took / products_s:.2f} times its matrix products"})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=float(os.environ.get(BUDGET, "540")), help="seconds")
    parser.add_argument("--models", nargs="+", choices=SIZES, help="default: all, or tiny without a GPU")
    parser.add_argument("--out", type=Path, help="also write OUT.md and OUT.json")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)  # of Case.by_itself
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, time.perf_counter() + options.budget)
    if options.part:
        part, model, speed, out = options.part
        case = Case(model, SIZES[model], clock, float(speed), Table([]))
        if part == "vllm":
            case.vllm_here()
        else:
            case.step_here(part)
        Path(out).write_text(json.dumps(case.table.lines))
        return 0
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)  # as workers have it
    heading = (
        f"{datetime.date.today()}; {clock.card()}; torch {torch.__version__}; Python {sys.version.split()[0]}"
    )
    text = [
        f"# strop on a GPU\n\n{heading}\n\n| comparison | difference | bound | |\n| --- | ---: | ---: | --- |"
    ]
    end = ["\nPublished by peers for their own trainers and machines:\n"]
    end += [f"- {who}: {what}: MFU {share}" for who, what, share in PUBLISHED]
    compared: list[Comparison] = []
    lines: list[Line] = []
    figures: dict[str, Any] = {"machine": heading, "rightness": compared, "speed": lines}

    def write() -> None:
        if options.out:
            table_text = "\n".join([*text, *map(row, lines), *end])
            atomic_write_text(options.out.with_suffix(".md"), f"{table_text}\n")
            # null for NaN and infinity, which JSON does not have
            finite = json.loads(json.dumps(figures), parse_constant=lambda name: None)
            atomic_write_text(options.out.with_suffix(".json"), json.dumps(finite, indent=1) + "\n")

    def say(line: str) -> None:
        text.append(line)
        print(line, flush=True)
        write()

    table = Table(lines, write)
    wrong: list[Comparison] = []

    def status() -> int:
        return 1 if wrong or any(line.get("note", "").startswith("failed") for line in lines) else 0

    def give_up() -> None:
        table.add({"model": "", "phase": "what was under way, and the rest", "note": "not finished: budget"})
        os._exit(status())  # nothing else ends a thread that compiles or waits for the device

    end_of_budget = threading.Timer(options.budget + OVER_S, give_up)
    end_of_budget.daemon = True
    end_of_budget.start()
    print(text[0], flush=True)
    for what, found, bound in rightness(device):
        compared.append((what, found, bound))
        if not found <= bound:
            wrong.append(compared[-1])
        say(f"| {what} | {found:.1e} | {bound:.0e} | {'ok' if found <= bound else 'WRONG'} |")
        if clock.left() < options.budget * (1 - SHARE_OF_COMPARISONS):  # compiled engines take a minute each
            say("| others |  |  | not run: budget |")
            break
    figures["matrix_product"] = peak = matrix_speed(clock, torch.bfloat16)
    titles = f"| {' | '.join(TITLES)} |\n|{' --- |' * 3}{' ---: |' * 5} --- |"
    known = published_peak(clock.card())
    published = "unknown" if math.isnan(known) else f"{known / 1e12:,.0f} TFLOP/s"
    say(f"\nMatrix product, bfloat16: {peak / 1e12:,.2f} TFLOP/s; published peak: {published}\n\n{titles}")
    models = options.models or (
        [size for size in SIZES if size != "tiny"] if device.type == "cuda" else ["tiny"]
    )
    head_speed(clock, table)
    cases = [Case(model, SIZES[model], clock, peak, table) for model in models]
    for case in cases:
        if clock.left() < 0:
            table.add({"model": case.name, "phase": "all", "note": "not run: budget"})
        else:
            case.inference()
            case.that_fits().training()
    for case in cases:
        case.steps()
    for case in cases:
        case.vllm()
    for case in cases:
        case.that_fits().variants()
    end_of_budget.cancel()
    return status()


if __name__ == "__main__":
    sys.exit(main())

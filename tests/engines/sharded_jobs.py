"""Functions that ranks run in the tests of sharded engines."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import token_trees
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop import ranks
from strop.algorithms.token_tree import NOTHING, PROMPT, Call
from strop.config.load import load_config
from strop.engines.base import OptimizerSettings, weights_hash
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch import offload
from strop.engines.torch.engine import TorchEngine
from strop.engines.torch.offload import Offload
from strop.engines.torch.sharding import ShardingSettings, part, whole
from strop.errors import CheckpointError, StropError
from strop.models.comparison import try_kept_results
from strop.models.deferred import WeightSource, defer_causal_lm, defer_scorer
from strop.models.loader import load_causal_lm, load_scorer, load_tokenizer
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel
from strop.protocol import DataProto
from strop.workers.losses import actor_objective, critic_objective

import tiny_model
from builders import random_samples

SETTINGS = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, eps=1e-8, grad_clip=1.0)
STEPS = 3
LEARNING_RATE = 1e-3  # at 1e-2 even another micro-batch size in one process moves the weights by 2e-5
Weights = dict[str, torch.Tensor]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def engine(folder: Path, role: str = "actor", *, sharding: dict[str, Any] | None = None, **options: Any):
    """The engine of a role: sharded when there is a process group."""
    options = {"device": torch.device("cpu"), "optimizer": SETTINGS, **options}
    wrapper = PolicyModel if role == "actor" else ValueModel
    if world_size() == 1:
        model = load_causal_lm(folder) if role == "actor" else load_scorer(folder, fresh_head_seed=1)
        return TorchEngine(wrapper(model), **options)
    deferred = defer_causal_lm(folder) if role == "actor" else defer_scorer(folder, fresh_head_seed=1)
    return TorchEngine(
        wrapper(deferred[0]), sharding=ShardingSettings(**sharding or {}), weights=deferred[1], **options
    )


def samples(n_rows: int = 16, seed: int = 0) -> DataProto:
    """A mini-batch with every column that the objectives read."""
    return _with_figures(random_samples(n_rows, seed=seed), seed)


def sessions(n_rows: int = 8) -> DataProto:
    """A mini-batch in which the tokens of every other row form a tree: on two ranks, those of the first."""
    draw = random.Random(1)
    trees = [[*token_trees.calls_of(draw), Call(NOTHING, [12, 5], [6])] for _ in range(n_rows // 2)]
    plain = [Call(PROMPT, [], [8, 9, 5]), Call(0, [11], [4])]
    return _with_figures(DataProto(token_trees.batch_of([row for tree in trees for row in (tree, plain)])), 0)


def _with_figures(found: DataProto, seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(5 + seed)
    mask = found.batch["response_mask"]
    for name, scale in (("advantages", 1.0), ("old_log_probs", 0.3), ("values", 0.3), ("returns", 1.0)):
        found.batch[name] = scale * torch.randn(mask.shape, generator=generator) * mask
    found.batch["old_log_probs"] -= 2.5 * mask
    found.batch["ref_log_prob"] = found.batch["old_log_probs"] - 0.1
    return found


def mine(batch: DataProto) -> DataProto:
    """This rank's rows; padded, as a controller does, with a row that has nothing to learn from."""
    missing = -len(batch) % world_size()
    if missing:
        padding = batch[torch.zeros(missing, dtype=torch.long)]
        padding.batch["response_mask"] = torch.zeros_like(padding.batch["response_mask"])
        batch = DataProto(
            {name: torch.cat([column, padding.batch[name]]) for name, column in batch.batch.items()}
        )
    return batch[torch.arange(rank(), len(batch), world_size())]


def objective(role: str, batch: DataProto, mode: str = "token-mean"):
    """The loss of a role with the denominators of the whole mini-batch."""
    config = load_config(
        [
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            f"critic.loss_agg_mode={mode}",
        ]
    )
    counts = {
        "n_tokens": float(batch.batch["response_mask"].sum()),
        "n_seqs": float(len(batch)),
        "max_response_length": 5,
    }
    if role == "actor":
        return actor_objective(config.actor_rollout_ref.actor, **counts)
    return critic_objective(config.critic, **counts)


def step(
    trained: TorchEngine, role: str, micro: MicroBatching, *, seed: int, rows: int = 16, mode="token-mean"
):
    """One update on this rank's rows of a mini-batch."""
    batch = samples(rows, seed)
    options = {"temperature": 0.9} if role == "actor" else {}
    metrics = trained.forward_backward(mine(batch), objective(role, batch, mode), micro, **options)
    return metrics, trained.optimizer_step(LEARNING_RATE)


def weights(trained: TorchEngine) -> Weights:
    return {name: weight.clone() for name, weight in trained.named_weights()}


def train(
    folder: Path, role: str, micro: MicroBatching, step_options: dict[str, Any], options: dict[str, Any]
):
    """Some updates; (weights, gradient norms, metrics of the last step) of this rank."""
    trained = engine(folder, role, **options)
    recomputes = bool(options.get("gradient_checkpointing"))
    assert trained.module.hugging_face_model.is_gradient_checkpointing == recomputes
    try_kept_results(trained.module)
    norms, metrics = [], {}
    for seed in range(STEPS):
        metrics, result = step(trained, role, micro, seed=seed, **step_options)
        norms.append(result.grad_norm)
    return weights(trained), norms, metrics


def train_counting(
    folder: Path, micro: MicroBatching, options: dict[str, Any]
) -> tuple[Weights, dict[str, int]]:
    """Updates of the actor: its weights, and the number of collectives by name."""
    trained, counts, originals = engine(folder, **options), {}, {}
    for name in ("reduce_scatter_single", "all_reduce", "all_gather_single"):
        originals[name] = getattr(dist, name)

        def counting(*arguments: Any, name: str = name, **named: Any) -> Any:
            # all-reduces of a few figures are not of gradients
            counts[name] = counts.get(name, 0) + (not arguments or arguments[0].numel() > 500)
            return originals[name](*arguments, **named)

        setattr(dist, name, counting)
    try:
        for seed in range(STEPS):
            step(trained, "actor", micro, seed=seed)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return weights(trained), counts


def train_offloaded(folder: Path, micro: MicroBatching, offloads: bool) -> tuple[Weights, int]:
    """The actor after passes and updates; how many of its parameters were moved, and came back.

    There is no second device here: a move is a copy in CPU memory, by the module's own way to its weights.
    """
    trained = engine(folder)
    if offloads:
        trained._offload = Offload(trained.module, trained._optimizer, trained.device)
        trained._offload._parameters = trained._offload._moments = True
    before = {name: part(weight).data_ptr() for name, weight in trained.module.named_parameters()}
    copied = lambda tensor, device: tensor.to(device, copy=True)  # noqa: E731
    with mock.patch.multiple(offload, copied=copied, _MOVED_AT_ONCE=1 << 14):
        assert len(list(offload._parts(trained._optimizer))) > 3
        for seed in range(STEPS):
            trained.infer(mine(samples(seed=seed)), micro, temperature=0.9)
            step(trained, "actor", micro, seed=seed)
    after = {name: part(weight).data_ptr() for name, weight in trained.module.named_parameters()}
    return weights(trained), sum(after[name] != place for name, place in before.items())


def save_untied(folder: Path, layers: int = 4) -> Path:
    """A Llama whose output layer is not tied, in several files, with the tiny tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    return _save(folder, transformers.LlamaConfig, files_of="100KB", tie_word_embeddings=False, **sizes)


def save_granite(folder: Path) -> Path:
    """A Granite with the tiny tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return _save(folder, transformers.GraniteConfig, embedding_multiplier=3.0, **sizes)


def _save(folder: Path, config_class: Any, *, files_of: str = "50GB", **options: Any) -> Path:
    tokenizer = tiny_model.build_tokenizer()
    torch.manual_seed(3)
    config = config_class(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=files_of)
    tokenizer.save_pretrained(folder)
    return folder


def save_as_bin(source: Path, folder: Path) -> None:
    """The same model in a file that is not safetensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def break_weights(source: Path, folder: Path) -> Path:
    """The same folder with weights that are cut short."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    return folder


def initial(folder: Path, role: str) -> Weights:
    return weights(engine(folder, role))


def gradient(
    folder: Path,
    role: str,
    micro: MicroBatching,
    options: dict[str, Any],
    make: Callable[[], DataProto] = samples,
) -> tuple[Weights, float]:
    """The whole gradient of one mini-batch, and its norm as the step reports it."""
    trained, batch = engine(folder, role, **options), make()
    options = {"temperature": 0.9} if role == "actor" else {}
    trained.forward_backward(mine(batch), objective(role, batch), micro, **options)
    found = {name: whole(weight.grad) for name, weight in trained.module.named_parameters()}
    found = {name: tensor.clone() for name, tensor in found.items()}
    return found, trained.optimizer_step(0.0).grad_norm


def poisoned_step(folder: Path) -> tuple[bool, bool, int]:
    """A step where only rank 1 has a gradient that is not finite."""
    trained = engine(folder)
    before = weights_hash(trained.named_weights())

    def loss(outputs, columns):
        return outputs["log_prob"].sum() * (float("nan") if rank() == 1 else 1.0), {}

    trained.forward_backward(samples(4), loss, MicroBatching(rows=4), temperature=1.0)
    skipped = trained.optimizer_step(0.1).skipped
    left = sum(weight.grad is not None for weight in trained.module.parameters())
    return skipped, weights_hash(trained.named_weights()) == before, left


def infer(folder: Path, micro: MicroBatching) -> dict[str, torch.Tensor]:
    """Twice, since a pass may leave something behind."""
    frozen = engine(folder, optimizer=None)
    frozen.infer(mine(samples()), micro, temperature=0.9)
    return frozen.infer(mine(samples()), micro, temperature=0.9, with_hidden=True)


def uneven_update(folder: Path) -> Weights:
    """Rank 0 has seven rows, one at a time, rank 1 one: a batch that nobody evened out."""
    trained, batch = engine(folder), samples(8)
    rows = batch if world_size() == 1 else batch[torch.arange(7) if rank() == 0 else torch.tensor([7])]
    for _ in range(2):
        trained.forward_backward(rows, objective("actor", batch), MicroBatching(rows=1), temperature=0.9)
        trained.optimizer_step(LEARNING_RATE)
    return weights(trained)


def full_kl(folder: Path) -> tuple[float, float]:
    """The largest full KL to the start, at the start and after some updates."""
    reference, trained = engine(folder, optimizer=None), engine(folder)
    trained.module.keep_reference_head()
    batch = mine(samples())
    micro = MicroBatching(rows=2)
    batch.batch["ref_hidden"] = reference.infer(batch, micro, with_hidden=True)["hidden"]
    figures = []
    for _ in range(2):
        kl = trained.infer(batch, micro, with_full_kl=True)["full_kl"]
        figures.append(ranks.total({"kl": float(kl.sum())}, torch.device("cpu"))["kl"])

        def loss(outputs, columns):
            return -(outputs["full_kl"] + outputs["log_prob"]).sum(), {}

        trained.forward_backward(batch, loss, micro, with_full_kl=True)
        trained.optimizer_step(LEARNING_RATE)
    return figures[0], figures[1]


def names_and_hash(folder: Path, sharding: dict[str, Any] | None = None) -> tuple[list[str], str]:
    trained = engine(folder, sharding=sharding)
    return [name for name, _ in trained.named_weights()], weights_hash(trained.named_weights())


def train_and_save(folder: Path, role: str, state: Path) -> str:
    trained = engine(folder, role)
    for seed in range(2):
        step(trained, role, MicroBatching(rows=4), seed=seed)
    trained.save(state)
    return weights_hash(trained.named_weights())


def load_and_save(folder: Path, role: str, state: Path, again: Path, sharding: dict[str, Any]) -> str:
    trained = engine(folder, role, sharding=sharding)
    trained.load(state)
    trained.save(again)
    return weights_hash(trained.named_weights())


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved state, by torch's own conversion to one file."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "state.pt")
        return torch.load(Path(scratch) / "state.pt")


def save_both_ways(folder: Path, out: Path) -> None:
    """The same state in the foreground and, with updates before it is written, in the background."""
    trained = engine(folder)
    step(trained, "actor", MicroBatching(rows=4), seed=0)
    trained.save(out / "fore")
    assert trained.save_is_done()
    trained.save(out / "back", background=True)
    for seed in (1, 2):
        step(trained, "actor", MicroBatching(rows=4), seed=seed)
    trained.finish_save()
    assert trained.save_is_done()
    trained.save(out / "later")


def failing_save(folder: Path, gone: Path) -> None:
    trained = engine(folder)
    gone.mkdir(exist_ok=True)
    (gone / f"__{rank()}_0.distcp").mkdir()  # in the way of this rank's file
    trained.save(gone, background=True)
    with contextlib.suppress(CheckpointError):
        trained.finish_save()
    trained.finish_save()  # a caller that was interrupted in the first call


def load(folder: Path, state: Path) -> None:
    engine(folder).load(state)


def failure(function: Callable[..., Any], *arguments: Any) -> str:
    """Class and message of the error that a call raises; empty without one."""
    try:
        function(*arguments)
    except StropError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def export_both_ways(folder: Path, role: str, out: Path) -> Weights:
    """A streamed export, and what ``export_from_shards`` needs."""
    trained = engine(folder, role)
    step(trained, role, MicroBatching(rows=4), seed=0)
    tokenizer = load_tokenizer(folder)
    trained.export(out / "streamed", tokenizer)
    trained.save(out / "state")
    trained.export(out / "no_weights", tokenizer, weights=False)
    return weights(trained)


class _LiveMemory(TorchDispatchMode):
    """The peak of bytes in CPU tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":  # a DTensor has no memory itself
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = storage
        # FSDP frees what it gathered by resizing the storage to nothing: read the current sizes
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive.values()))
        return result


def measure_memory(folder: Path) -> tuple[int, int, int]:
    """Building an engine: (peak bytes, bytes of the model, whole tensors at once)."""
    at_once = 0
    alive: list[weakref.ref] = []
    stream = WeightSource.stream

    def watched(source: WeightSource):
        nonlocal at_once
        for name, tensor in stream(source):
            alive.append(weakref.ref(tensor))
            at_once = max(at_once, sum(reference() is not None for reference in alive))
            yield name, tensor
            del tensor

    WeightSource.stream = watched
    try:
        with _LiveMemory() as memory:
            built = engine(folder, optimizer=None)
    finally:
        WeightSource.stream = stream
    return memory.peak, sum(weight.nbytes for _, weight in built.named_weights()), at_once

"""Batches with sessions whose tokens form a tree: micro-batches, gradients of an objective, and refusals."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharded_jobs as jobs
import token_trees
import torch

from strop.algorithms.advantages import gae
from strop.algorithms.token_tree import NOTHING, PROMPT, Call, has_branches
from strop.engines.micro_batches import MicroBatching, columns_of
from strop.engines.torch.engine import TorchEngine
from strop.errors import ConfigError
from strop.models import tree
from strop.models.policy import PolicyModel
from strop.protocol import DataProto
from strop.workers.reward_model import RewardModelWorker

from messages import naming

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
families = importlib.import_module("families")

MICRO = [MicroBatching(rows=3), MicroBatching(max_tokens=90)]


def engine(role: str = "actor", *, packed: bool = False, **model: object) -> TorchEngine:
    wrapper, head = families.ROLES[role]
    built = families.model(model.pop("family", "Qwen2"), head, **model)
    return TorchEngine(wrapper(built, packed=packed), device=torch.device("cpu"), optimizer=jobs.SETTINGS)


def mixed(rows: int = 24) -> DataProto:
    batch = DataProto(token_trees.random_batch(rows, seed=3, width=44))
    assert 4 < int(has_branches(batch.batch["follows"]).sum()) < rows - 4
    return batch


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("micro", MICRO, ids=["rows", "tokens"])
def test_plain_rows_have_the_same_bits_with_and_without_trees_in_their_batch(micro, packed):
    batch = mixed()
    plain = (~has_branches(batch.batch["follows"])).nonzero()[:, 0]
    alone = {name: column for name, column in batch[plain].batch.items() if name != "follows"}
    for role in ("actor", "critic"):
        computing = engine(role, packed=packed)
        together, expected = computing.infer(batch, micro), computing.infer(DataProto(alone), micro)
        assert all(torch.equal(column[plain], expected[name]) for name, column in together.items())


def test_plain_rows_are_not_unfolded_and_train_as_without_the_column(monkeypatch):
    monkeypatch.setattr(tree, "Leaves", None)
    batch = jobs.samples()
    columns = {**batch.batch, "follows": token_trees.plain(*batch.batch["response_mask"].shape)}
    found = []
    for given in (batch, DataProto(columns)):
        trained = engine(packed=True)
        trained.forward_backward(given, jobs.objective("actor", batch), MicroBatching(max_tokens=40))
        found.append(torch.cat([weight.grad.flatten() for weight in trained.module.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_micro_batches_count_the_tokens_of_leaves(packed):
    batch, cap = mixed(60), 120
    trees, computed = has_branches(batch.batch["follows"]), []
    role = engine(packed=packed).module
    role.hugging_face_model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: computed.append(args[0].numel())
    )
    pieces = MicroBatching(max_tokens=cap).split(batch, packed=packed)
    assert sorted(torch.cat(pieces).tolist()) == list(range(60))
    for piece in pieces:
        assert trees[piece].all() or not trees[piece].any()
        with torch.no_grad():
            role(columns_of(batch, piece, torch.device("cpu")))
    of_trees = [
        (tokens, len(piece)) for tokens, piece in zip(computed, pieces, strict=True) if trees[piece].all()
    ]
    assert all(tokens <= cap or rows == 1 for tokens, rows in of_trees)
    assert max(tokens for tokens, rows in of_trees if rows > 1) > 0.5 * cap
    pieces = MicroBatching(rows=6).split(batch, packed=packed)
    leaves = [len(list(token_trees.sequences(batch[piece].batch))) for piece in pieces if trees[piece].all()]
    assert max(leaves) == 6
    [lone] = MicroBatching(max_tokens=40).split(batch[trees][:1])  # no key bounds the tokens of its leaves
    assert len(lone) == 1


SESSION = [
    Call(PROMPT, [], [7, 8, 9]),  # the main agent asks a sub-agent
    Call(NOTHING, [12, 5, 6], [4, 9]),  # which has a context of its own
    Call(1, [11], [8, 5]),  # and two turns
    Call(0, [10, 13], [6, 7]),  # the main agent goes on
    Call(NOTHING, [12, 14, 15, 4], [5, 9, 16]),  # with a compacted history
    Call(0, [10, 14], [6]),  # and tries the second turn once more
]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_session_learns_what_each_of_its_branches_would_alone_with_shared_tokens_once(packed):
    """The oracle: float64, one forward pass a branch, the loss token by token as in the papers."""
    batch = token_trees.batch_of([SESSION, [Call(PROMPT, [], [8, 9, 5]), Call(0, [11], [4, 6])]], width=30)
    mask, generator = batch["response_mask"].bool(), torch.Generator().manual_seed(1)
    scores, values = torch.zeros(mask.shape), 0.3 * torch.randn(mask.shape, generator=generator)
    for row, score in enumerate((1.0, -0.5)):
        scores[row, int(mask[row].nonzero().max())] = score
    advantages, returns = gae(scores, values, mask, gamma=0.99, lam=0.95, whiten=False)
    old = -3 + 0.3 * torch.randn(mask.shape, generator=generator)
    columns = {
        "advantages": advantages,
        "returns": returns,
        "values": values * mask,
        "old_log_probs": old * mask,
    }
    samples = DataProto({**batch, **columns, "ref_log_prob": (old - 0.2) * mask})
    branches = list(token_trees.sequences(batch))
    assert [len(own) for row, _, own in branches if row == 0] == [4, 5, 3, 1]
    n_tokens = int(mask.sum())
    for role in ("actor", "critic"):
        trained = engine(role, packed=packed)
        trained.forward_backward(samples, jobs.objective(role, samples), MicroBatching(rows=1))
        found = torch.cat([weight.grad.flatten() for weight in trained.module.parameters()]).double()

        model, loss = families.model("Qwen2", families.ROLES[role][1]).double(), 0.0
        if role == "critic":
            model.load_state_dict(trained.module.hugging_face_model.state_dict())
        for row, ids, own in branches:
            if role == "actor":
                all_log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            else:
                states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
                all_values = model.score(states)[:, 0]
            for place, token in own:
                if role == "actor":
                    log_probs = all_log_probs[place - 1]
                    log_prob, before, a = (
                        log_probs[ids[place]],
                        old[row, token].double(),
                        advantages[row, token],
                    )
                    ratio = (log_prob - before).exp()
                    loss = loss + torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
                    loss = loss + 0.01 * (log_probs.exp() * log_probs).sum()
                    behind = (before - 0.2) - log_prob
                    loss = loss + 0.001 * (behind.expm1() - behind)
                else:
                    value, target, before = all_values[place - 1], returns[row, token], values[row, token]
                    near = before + (value - before).clamp(-0.5, 0.5)
                    loss = loss + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
        (loss / n_tokens).backward()
        expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        assert (found - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_full_kl_of_trees_reads_the_references_states_at_their_own_tokens(packed):
    batch = token_trees.random_batch(12, seed=8)
    policy, reference = (PolicyModel(families.model("Qwen2"), packed=packed) for _ in range(2))
    policy.keep_reference_head()
    torch.manual_seed(2)
    with torch.no_grad():
        hidden = reference(batch, with_hidden=True)["hidden"]
        assert policy({**batch, "ref_hidden": hidden}, with_full_kl=True)["full_kl"].abs().max() < 1e-6
        for weight in policy.parameters():
            weight += 0.02 * torch.randn_like(weight)
        found = policy({**batch, "ref_hidden": hidden}, with_full_kl=True)["full_kl"]
        for row, ids, own in token_trees.sequences(batch):
            models = (policy.hugging_face_model, reference.hugging_face_model)
            now, then = (model(torch.tensor([ids])).logits[0].log_softmax(-1) for model in models)
            places = [place - 1 for place, _ in own]
            expected = (now.exp() * (now - then)).sum(-1)[places]
            torch.testing.assert_close(found[row, [t for _, t in own]], expected, atol=1e-5, rtol=1e-4)


def test_the_balance_of_experts_is_a_mean_over_leaves():
    options = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "router_aux_loss_coef": 0.5,
    }
    batch = token_trees.random_batch(10, seed=4)
    whole = DataProto(batch)
    leaves = [
        {"input_ids": torch.tensor([ids]), "response_mask": torch.zeros(1, len(ids) - 1)}
        for _, ids, _ in token_trees.sequences(batch)
    ]
    width = max(leaf["input_ids"].shape[1] for leaf in leaves)
    separate = {
        name: torch.zeros(len(leaves), width, dtype=torch.long) for name in ("input_ids", "attention_mask")
    }
    separate["response_mask"] = torch.zeros(len(leaves), width - 1)
    for row, (_, ids, own) in enumerate(token_trees.sequences(batch)):
        separate["input_ids"][row, : len(ids)] = torch.tensor(ids)
        separate["attention_mask"][row, : len(ids)] = 1
        separate["response_mask"][row, [place - 1 for place, _ in own]] = 1
    separate["position_ids"] = (separate["attention_mask"].cumsum(1) - 1).clamp(min=0)
    separate["responses"] = separate["input_ids"][:, 1:]
    figures = []
    for given in (whole, DataProto(separate)):
        trained = engine(family="Qwen3Moe", **options)
        loss = lambda outputs, columns: (outputs["log_prob"].sum() / 100, {})  # noqa: E731
        metrics = trained.forward_backward(given, loss, MicroBatching(rows=4))
        figures.append(
            (metrics["router_aux_loss"], metrics["loss"], float(trained.optimizer_step(0.0).grad_norm))
        )
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_trees_are_refused_by_name_where_they_are_not_unfolded():
    batch = mixed()
    sharing = engine(packed=True)
    sharing.module.sequence_group = SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match=naming("ulysses_sequence_parallel_size=2", "follows")):
        sharing.infer(batch, MICRO[0])
    with pytest.raises(ConfigError, match=naming("reward_model.enable=True", "follows")):
        RewardModelWorker._inputs(SimpleNamespace(), batch)


def test_megatron_refuses_trees_by_name():
    pytest.importorskip("megatron.core")
    from strop.engines.megatron.engine import MegatronEngine

    with pytest.raises(ConfigError, match=naming("strategy=megatron", "follows", "fsdp")):
        MegatronEngine._split(SimpleNamespace(), mixed(), MICRO[0])

"""Rows whose tokens form a tree compute what a separate row for each of their branches would."""

from __future__ import annotations

import functools

import families
import pytest
import token_trees
import torch

from strop.algorithms.token_tree import PROMPT, Call
from strop.models.passes.micro_batch import MicroBatch
from strop.models.policy import PolicyModel
from strop.models.scorer import ValueModel


@pytest.fixture
def in_float64(monkeypatch):
    """Keep float64 where passes convert to float32, so that a difference is one of the computation."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))


ROLES = {"actor": (PolicyModel, "ForCausalLM"), "critic": (ValueModel, "ForSequenceClassification")}


def role_of(name: str, *, packed: bool):
    wrapper, head = ROLES[name]
    role = wrapper(families.model("Qwen2", head), packed=packed).double()
    if name == "actor":  # the blocks of an output layer are float32
        project = role.projection
        project.current = lambda: project
    return role


def random_trees():
    return token_trees.random_batch(200)


@functools.cache
def separately(name: str):
    """Return the figures of all sampled tokens and the gradient of their weighted sum, leaf by leaf."""
    batch, role = random_trees(), role_of(name, packed=False)
    model, found = role.hugging_face_model, {}
    weights, total = weights_of(batch), 0.0
    for row, ids, own in token_trees.sequences(batch):
        places = torch.tensor([place for place, _ in own]) - 1
        tokens = [t for _, t in own]
        if name == "actor":
            logits = model(input_ids=torch.tensor([ids])).logits[0, places]
            log_probs = logits.log_softmax(-1)
            picked = log_probs[range(len(own)), [ids[place] for place, _ in own]]
            outputs = {"log_prob": picked, "entropy": -(log_probs.exp() * log_probs).sum(-1)}
        else:
            hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, places]
            outputs = {"values": model.score(hidden)[:, 0]}
        for output, values in outputs.items():
            column = found.setdefault(output, torch.zeros(batch["response_mask"].shape, dtype=torch.float64))
            column[row, tokens] += values.detach()  # each token is in one leaf
            total = total + (values * weights[output][row, tokens]).sum()
    total.backward()
    return found, gradient_of(role)


def weights_of(batch):
    draw = torch.Generator().manual_seed(3)
    shape = batch["response_mask"].shape
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name in ("log_prob", "entropy", "values")
    }


def gradient_of(role) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in role.parameters() if weight.grad is not None])


@pytest.mark.fast("actor-packed", "critic-padded")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", list(ROLES))
def test_200_random_trees_equal_separate_rows(in_float64, name, packed):
    batch = random_trees()
    expected, expected_gradient = separately(name)
    role = role_of(name, packed=packed)
    outputs = role(MicroBatch.on(torch.device("cpu"), batch))
    weights = weights_of(batch)
    sum((output * weights[kind]).sum() for kind, output in outputs.items()).backward()
    assert outputs.keys() == expected.keys()
    for kind, output in outputs.items():
        torch.testing.assert_close(output.detach(), expected[kind], atol=1e-12, rtol=0)
    assert (gradient_of(role) - expected_gradient).norm() <= 1e-12 * expected_gradient.norm()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_tree_without_anything_to_learn_reaches_every_parameter(packed):
    """Rows that fill up a rank's share: other ranks wait for its gradients."""
    batch = token_trees.random_batch(8, seed=1)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for name, (wrapper, head) in ROLES.items():
        role = wrapper(families.model("Qwen2", head), packed=packed)
        outputs = role(batch)
        sum(output.sum() for output in outputs.values()).backward()
        assert all(not output.any() for output in outputs.values()), name
        assert all(weight.grad is not None and not weight.grad.any() for weight in role.parameters())


def test_samples_of_a_prompt_share_it_in_packed_passes():
    calls = [Call(PROMPT, [], [7, 8]), Call(PROMPT, [], [9]), Call(0, [5], [6, 4])]
    batch = token_trees.batch_of([calls])
    prompt = int(batch["attention_mask"].sum()) - 6
    role, computed = PolicyModel(families.model("Qwen2"), packed=True), []
    role.hugging_face_model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: computed.append(args[0].numel())
    )
    with torch.no_grad():
        role(batch)
    assert computed == [prompt + (5 - 1) + (1 - 1)]  # the last token of a response predicts nothing

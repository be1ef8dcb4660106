"""Columns of a teacher are read at sampled tokens alone, also where the tokens of a row form a tree."""

from __future__ import annotations

import math

import families
import pytest
import token_trees
import torch

from strop.algorithms.distillation import divergence
from strop.models.policy import PolicyModel
from strop.models.teaching import Teaching

WORDS = 19


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("top_k", [None, 3], ids=["hidden states", "top 3"])
def test_each_branch_is_compared_at_its_own_tokens_whatever_stands_at_the_others(packed, top_k):
    batch = token_trees.random_batch(12, seed=8)
    policy, teacher = (PolicyModel(families.model("Qwen2"), packed=packed) for _ in range(2))
    policy.teaching = Teaching(kind="reverse", js_weight=0.5, words=WORDS)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.05 * torch.randn_like(weight)
        policy.teacher_heads = [teacher.projection.current()]
        if top_k is None:
            columns = {"teacher_hidden": teacher(batch, with_hidden=True)["hidden"]}
        else:
            found = teacher(batch, top_k=top_k, words=WORDS)
            columns = {"teacher_ids": found["top_ids"].int(), "teacher_top": found["top"]}
        for column in columns.values():  # as of padding, or of tokens that a tool inserted
            column[batch["response_mask"] == 0] = math.nan if column.is_floating_point() else 10**6
        outputs = policy({**batch, **columns}, with_teacher=True)
        assert not outputs["teacher_kl"][batch["response_mask"] == 0].any()
        for row, ids, own in token_trees.sequences(batch):
            models = (teacher.hugging_face_model, policy.hugging_face_model)
            log_p, log_q = (
                model(torch.tensor([ids])).logits[0, :, :WORDS].log_softmax(-1) for model in models
            )
            if top_k is not None:
                best = log_p.topk(top_k).indices
                rest = torch.ones_like(log_p).scatter(1, best, 0)
                log_p, log_q = (
                    torch.cat([x.gather(1, best), (x.exp() * rest).sum(1, keepdim=True).log()], 1)
                    for x in (log_p, log_q)
                )
            expected = divergence(log_p, log_q, "reverse")[[place - 1 for place, _ in own]]
            tokens = [t for _, t in own]
            torch.testing.assert_close(outputs["teacher_kl"][row, tokens], expected, atol=1e-5, rtol=1e-4)
            assert outputs["teacher_kl"][row, tokens].min() > 0

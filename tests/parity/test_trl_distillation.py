"""Divergences against TRL 1.16's ``generalized_jsd_loss``, by trl_distillation.py, and NeMo-RL's formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trl_distillation import BATCHES, V, logits, settings

from strop.algorithms.distillation import compare, divergence
from strop.algorithms.output_layer import OutputLayer

STORED = json.loads(Path(__file__).with_name("trl_distillation.json").read_text())


@pytest.mark.parametrize("seed", range(BATCHES))
def test_values_and_gradients_are_those_of_trl(seed):
    teacher, student = logits(seed)
    beta, temperature = settings(seed)
    student.requires_grad_()
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "js")
    options = {"kind": kind, "js_weight": beta, "temperature": temperature}
    words = OutputLayer(torch.eye(V))  # the hidden states are then the logits
    loss = compare(student, words, teacher, words, **options).divergence_N.sum()
    (gradient,) = torch.autograd.grad(loss, student)
    assert [float(loss.detach()), *gradient[0, :2].tolist()] == pytest.approx(
        STORED[seed], rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("k", [2, 4])
def test_nemo_rls_mixed_kl_is_two_kinds_against_a_teacher_that_forbids_other_words(k):
    """NeMo-RL's ``DistillationLossFn`` with ``kl_type=mixed``, of its formula: w forward + (1 - w) reverse.

    The teacher is its top k normalized anew; with ``zero_outside_topk`` other words have the log-prob -100
    (``log_infinitesimal``), which adds H_rest - (-100) P_rest to the reverse KL, without it the student is
    normalized anew, too. So for k < V it compares another teacher than ``teacher.top_k`` does: there all
    other words are one, and keep their probability.
    """
    w, infinitesimal = 0.25, -100.0
    teacher = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    log_q = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64).log()
    top_q, top_p = log_q[:k], (teacher[:k] / teacher[:k].sum()).log()
    forward = (top_p.exp() * (top_p - top_q)).sum()
    reverse = (top_q.exp() * (top_q - top_p)).sum()
    rest_entropy = (log_q.exp() * log_q).sum() - (top_q.exp() * top_q).sum()
    by_hand = w * forward + (1 - w) * (reverse + rest_entropy - infinitesimal * (1 - top_q.exp().sum()))
    log_p = torch.full_like(log_q, infinitesimal)
    log_p[:k] = top_p
    ours = w * divergence(log_p, log_q, "forward") + (1 - w) * divergence(log_p, log_q, "reverse")
    assert float(ours) == pytest.approx(float(by_hand), abs=1e-12)

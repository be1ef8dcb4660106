"""The first update of runs with a teacher: its gradient against float64, by transformers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_distillation import ALONE
from test_turn_runs import ENVIRONMENT, STOPS
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.engines.torch.engine import TorchEngine
from strop.workers.policy import ActorRolloutRefWorker

import runs
import tiny_model

WORDS = 19
PADDED = 32
PACKED = "actor_rollout_ref.model.use_remove_padding=True"
FEW_ROWS = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"
TURNS = ("environment.turn_length=4", "data.max_response_length=16", "data.val_files=[]", STOPS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runs.make_inputs(tmp_path_factory.mktemp("gradients"))
    tiny_model.save(folder / "teacher", hidden=48, seed=5)
    (folder / "replies.py").write_text(ENVIRONMENT)
    student = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(3)
    student.resize_token_embeddings(PADDED, mean_resizing=False)
    torch.nn.init.normal_(student.get_output_embeddings().weight[WORDS:], std=0.1)
    student.save_pretrained(folder / "padded")
    for file in (folder / "model").glob("*token*"):
        (folder / "padded" / file.name).write_bytes(file.read_bytes())
    (folder / "padded" / "chat_template.jinja").write_text(tiny_model.CHAT_TEMPLATE)
    return folder


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def expected_loss(student: torch.nn.Module, teacher: torch.nn.Module, batch: dict[str, Tensor], kind: str):
    """Return the mean over tokens, and log q - log p of the sampled ones [B, T]."""
    sampled = torch.zeros(batch["response_mask"].shape, dtype=torch.float64)
    total, n = torch.zeros((), dtype=torch.float64), batch["response_mask"].sum()
    width = sampled.shape[1]
    for ids, real, mask, found in zip(
        *(batch[name] for name in ("input_ids", "attention_mask", "response_mask")), sampled, strict=True
    ):
        places = real.cumsum(0) - 1
        chosen = mask.nonzero()[:, 0]
        before, answer = places[-width:][chosen] - 1, ids[-width:][chosen]
        row = ids[real.bool()][None]
        log_q = student(input_ids=row).logits[0, before, :WORDS].log_softmax(-1)
        with torch.no_grad():  # without rows for padding ids
            log_p = teacher(input_ids=row.clamp(max=WORDS - 1)).logits[0, before, :WORDS].log_softmax(-1)
        p, q, m = log_p.exp(), log_q.exp(), (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
        word = answer < WORDS
        q_N, p_N = (x.gather(1, answer.clamp(max=WORDS - 1)[:, None])[:, 0] * word for x in (log_q, log_p))
        found[chosen] = (q_N - p_N).detach()
        if kind == "sampled":
            total = total + (found[chosen] * q_N).sum() / n
        elif kind == "reverse":
            total = total + (q * (log_q - log_p)).sum() / n
        elif kind == "forward":
            total = total + (p * (log_p - log_q)).sum() / n
        elif kind == "top 4":  # forward, all others as one word
            chosen = log_p.topk(4).indices
            p, q = (torch.cat([x.gather(1, chosen), 1 - x.gather(1, chosen).sum(1, True)], 1) for x in (p, q))
            total = total + (p * (p / q).log()).sum() / n
        elif kind == "js":
            total = total + (0.3 * p * (log_p - m) + 0.7 * q * (log_q - m)).sum() / n
    return total, sampled


@pytest.mark.parametrize("kind", ["sampled", "reverse", "forward", "js", "top 4"])
@pytest.mark.parametrize("case", ["plain", "padded head", "turns"])
def test_the_first_gradient_is_that_of_transformers(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, case: str
) -> None:
    student = inputs / ("padded" if case == "padded head" else "model")
    found: dict[str, dict[str, Tensor]] = {}

    def update(worker, batch, loss):
        found.setdefault("batch", batch.batch)
        return own_update(worker, batch, loss)

    def step(engine, rate):
        named = engine.module.hugging_face_model.named_parameters()
        found.setdefault("gradients", {name: weight.grad.clone() for name, weight in named})
        return own_step(engine, rate)

    own_update, own_step = ActorRolloutRefWorker._update, TorchEngine.optimizer_step
    monkeypatch.setattr(ActorRolloutRefWorker, "_update", update)
    monkeypatch.setattr(TorchEngine, "optimizer_step", step)
    more = {"js": ["teacher.js_weight=0.3"], "top 4": ["teacher.top_k=4"]}.get(kind, [])
    keys = [f"teacher.kl={'forward' if kind == 'top 4' else kind}", *more]
    if case == "turns":
        keys += [f"environment.path={inputs / 'replies.py'}:Replies", *TURNS]
    layout = FEW_ROWS if case == "plain" else PACKED
    runs.train(
        runs.overrides(
            inputs,
            tmp_path,
            *ALONE,
            f"actor_rollout_ref.model.path={student}",
            f"teacher.model.path={inputs / 'teacher'}",
            "trainer.total_training_steps=1",
            "actor_rollout_ref.actor.grad_clip=1e9",
            layout,
            *keys,
        )
    )
    batch, oracle = found["batch"], load(student)
    loss, kl_BT = expected_loss(oracle, load(inputs / "teacher"), batch, kind)
    loss.backward()
    if kind == "sampled":
        torch.testing.assert_close(batch["advantages"].double(), -kl_BT, atol=5e-6, rtol=1e-5)
    if case == "padded head":
        assert (batch["responses"] >= WORDS).any()
    if case == "turns":
        assert (batch["attention_mask"][:, -16:] > batch["response_mask"]).any()
    for name, weight in oracle.named_parameters():
        torch.testing.assert_close(found["gradients"][name].double(), weight.grad, atol=2e-6, rtol=1e-4)

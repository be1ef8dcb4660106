"""Fine-tuning on given answers with a teacher: the first gradient against float64, by transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.engines.torch.engine import TorchEngine
from strop.errors import ConfigError, StropError
from strop.workers.supervised import SftWorker

import supervised_runs
import tiny_model

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = supervised_runs.make_inputs(tmp_path_factory.mktemp("sft_teacher"))
    tiny_model.save(folder / "teacher", hidden=48, seed=5)
    return folder


def expected(folder: Path, batch, kind: str, k: int | None, nll_coef: float):
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager")
        for name in ("model", "teacher")
    )
    total, n = torch.zeros((), dtype=torch.float64), batch["response_mask"].sum()
    width = batch["response_mask"].shape[1]
    for ids, real, mask in zip(
        *(batch[name] for name in ("input_ids", "attention_mask", "response_mask")), strict=True
    ):
        chosen, row = mask.nonzero()[:, 0], ids[real.bool()][None]
        before = (real.cumsum(0) - 1)[-width:][chosen] - 1
        log_q, log_p = (
            model(input_ids=row).logits[0, before].log_softmax(-1) for model in (student, teacher)
        )
        nll = -log_q.gather(1, ids[-width:][chosen][:, None]).sum()
        log_p = log_p.detach()
        if k is not None:
            best = log_p.topk(k).indices
            rest = torch.ones_like(log_p).scatter(1, best, 0)
            log_p, log_q = (
                torch.cat([x.gather(1, best), (x.exp() * rest).sum(1, keepdim=True).log()], 1)
                for x in (log_p, log_q)
            )
        kl = log_p.exp() * (log_p - log_q) if kind == "forward" else log_q.exp() * (log_q - log_p)
        total = total + (2 * kl.sum() + nll_coef * nll) / n
    total.backward()
    return float(total), dict(student.named_parameters())


@pytest.mark.parametrize(
    ("kind", "k", "nll_coef"), [("forward", None, 0.0), ("reverse", None, 0.3), ("forward", 4, 0.3)]
)
def test_the_first_gradient_is_that_of_transformers(inputs, tmp_path, monkeypatch, kind, k, nll_coef):
    found = {}

    def train_on(worker, batch, *arguments, **options):
        found.setdefault("batch", batch.batch)
        found.setdefault("metrics", metrics := own_train_on(worker, batch, *arguments, **options))
        return metrics

    def step(engine, rate):
        named = engine.module.hugging_face_model.named_parameters()
        found.setdefault("gradients", {name: weight.grad.clone() for name, weight in named})
        return own_step(engine, rate)

    own_train_on, own_step = SftWorker.train_on, TorchEngine.optimizer_step
    monkeypatch.setattr(SftWorker, "train_on", train_on)
    monkeypatch.setattr(TorchEngine, "optimizer_step", step)
    keys = [f"teacher.kl={kind}", f"update.nll_coef={nll_coef}", "teacher.coef=2", "update.grad_clip=1e9"]
    keys += [] if k is None else [f"teacher.top_k={k}"]
    keys += [f"teacher.model.path={inputs / 'teacher'}", "trainer.total_training_steps=1"]
    supervised_runs.train("sft", supervised_runs.overrides(inputs, tmp_path, *keys))
    loss, parameters = expected(inputs, found["batch"], kind, k, nll_coef)
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient.double(), parameters[name].grad, atol=2e-6, rtol=1e-4)


@needs_peft
@pytest.mark.parametrize("keys", [(), ("teacher.top_k=3",)])
def test_the_model_with_its_adapters_off_teaches_nothing_at_first(inputs, tmp_path, keys):
    own = ("teacher.model.path=reference", "model.lora_rank=4", "trainer.total_training_steps=1", *keys)
    supervised_runs.train("sft", supervised_runs.overrides(inputs, tmp_path, *own))
    (line,) = supervised_runs.metrics(tmp_path)
    assert line["train/teacher_kl"] == pytest.approx(0, abs=1e-7)
    assert line["train/teacher_agreement"] == 1


def test_what_fits_no_teacher_is_refused(inputs, tmp_path):
    def build(*keys):
        return supervised_runs.train("sft", supervised_runs.overrides(inputs, tmp_path, *keys))

    with pytest.raises(ConfigError, match="lora_rank"):
        build("teacher.model.path=reference")
    with pytest.raises(ConfigError, match=r"teacher\.kl"):
        build(f"teacher.model.path={inputs / 'teacher'}", "teacher.kl=sampled")
    with pytest.raises(StropError, match=r"teacher\.model\.path"):
        build(f"teacher.model.path={inputs / 'nothing'}")

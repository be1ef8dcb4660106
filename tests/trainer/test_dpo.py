"""strop dpo: the reference, figures and refusals; test_supervised.py trains as transformers does."""

from __future__ import annotations

import functools
import logging
import resource
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from strop.algorithms.preference import REFERENCE_INPUTS
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_tree
from strop.config.trees import DPO
from strop.controller.group import LocalWorkerGroup
from strop.errors import CheckpointError, ConfigError
from strop.trainer.supervised import PreferenceTrainer, build
from strop.trainer.supervised.reference import Reference
from strop.workers.supervised import PreferenceWorker

import tiny_model
from messages import mentions, naming
from runs import undrawn
from supervised_runs import final_weights, make_inputs, metrics, overrides, require_equal_weights, train

CACHE = "reference_log_probs/train.safetensors"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trained(inputs):
    return train("dpo", overrides(inputs, inputs / "run", "trainer.save_freq=2"))


@pytest.fixture
def passes(monkeypatch):
    """Numbers of rows that the workers evaluate with the reference."""
    found = []
    evaluate = PreferenceWorker.evaluate_reference

    def counted(self, batch):
        found.append(len(batch))
        return evaluate(self, batch)

    counted.__dict__.update(evaluate.__dict__)
    monkeypatch.setattr(PreferenceWorker, "evaluate_reference", counted)
    return found


def log_probs(model, dataset, name) -> torch.Tensor:
    """Return transformers' log-probs of whole answers, each in a pass of its own."""
    found = []
    for row in range(len(dataset)):
        prompt, answer = dataset[row]["input_ids"], dataset[row][name]
        with torch.no_grad():
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, answer[:, None]).sum())
    return torch.stack(found)


def test_the_reference_is_the_model_before_training(inputs, trained):
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    for split, loader in (("train", trained.train_loader), ("val", trained.val_loader)):
        cached = load_file(inputs / "run" / "reference_log_probs" / f"{split}.safetensors")
        for name in ("chosen", "rejected"):
            expected = log_probs(model, loader.dataset, name)
            torch.testing.assert_close(cached[f"ref_{name}_log_prob"], expected, atol=1e-5, rtol=1e-5)


def test_metrics_agree_with_the_exported_model(inputs, trained):
    dataset, last = trained.val_loader.dataset, metrics(inputs / "run")[-1]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (inputs / "model", inputs / "run" / "global_step_4" / "actor" / "huggingface")
    )
    rewards, sums = {}, {}
    for name in ("chosen", "rejected"):
        sums[name] = log_probs(after, dataset, name)
        rewards[name] = 0.1 * (sums[name] - log_probs(before, dataset, name))
        assert last[f"val/rewards/{name}"] == pytest.approx(rewards[name].mean().item(), abs=1e-5)
        assert last[f"val/logps/{name}"] == pytest.approx(sums[name].mean().item(), abs=1e-4)
    margins = rewards["chosen"] - rewards["rejected"]
    assert last["val/rewards/margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert last["val/rewards/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert last["val/rewards/accuracy/even"] == pytest.approx((margins[::2] > 0).float().mean().item())
    assert last["val/loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), abs=1e-5)
    tokens = sum(len(dataset[row]["chosen"]) for row in range(len(dataset)))
    assert last["val/nll"] == pytest.approx(-sums["chosen"].sum().item() / tokens, abs=1e-5)


def test_every_pair_is_trained_on_and_the_trained_model_is_measured(inputs, tmp_path, capsys):
    options = ("data.val_files=[]", "data.train_batch_size=10", "trainer.total_training_steps=null")
    trainer = train("dpo", overrides(inputs, tmp_path, *options))
    lines = metrics(tmp_path)
    assert [line["epoch"] for line in lines] == pytest.approx([1 / 3, 2 / 3, 1])  # 10, 10 and 4 of 24 pairs
    rewards = {}
    for name in ("chosen", "rejected"):
        before, after = (
            log_probs(AutoModelForCausalLM.from_pretrained(folder), trainer.train_loader.dataset, name)
            for folder in (inputs / "model", tmp_path / "final_model")
        )
        rewards[name] = 0.1 * (after - before)
    margins = rewards["chosen"] - rewards["rejected"]
    assert "final/loss" not in lines[-2]
    assert lines[-1]["final/rewards/margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert lines[-1]["final/rewards/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    shown = capsys.readouterr().out
    assert mentions(shown, "step 3/3", "accuracy ", "margin ", "final accuracy ", "final margin ")
    assert main(["view", str(tmp_path)]) == 0
    assert mentions(capsys.readouterr().out, "train/rewards/accuracy", "final/rewards/margin")


def test_a_second_fit_keeps_the_reference_of_the_first(inputs, trained, tmp_path, passes):
    nothing = "trainer.save_freq=-1", "trainer.save_minutes=null", "trainer.test_freq=-1"
    with undrawn():
        trainer = build(PreferenceTrainer, load_tree(DPO, overrides(inputs, tmp_path, *nothing)))
        trainer.init_workers()
        trainer.fit(lambda step, metrics: step < 2)
        trainer.fit()
    assert sum(passes) == 24 + 10
    require_equal_weights(tmp_path, final_weights(inputs / "run"))


def test_a_resume_computes_no_reference_again(inputs, trained, tmp_path, passes):
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1")
    train("dpo", options)
    assert sum(passes) == 24 + 10
    passes.clear()
    resumed = train("dpo", [*options, "trainer.total_training_steps=6", "trainer.resume_mode=auto"])
    assert passes == []
    assert resumed.global_step == 6


def interrupted(is_now):
    """Return the reference's pass over a batch, interrupted before the first for which ``is_now()``."""
    evaluate = PreferenceWorker.evaluate_reference

    @functools.wraps(evaluate)
    def struck(self, batch):
        if is_now():
            raise KeyboardInterrupt
        return evaluate(self, batch)

    return struck


def test_a_reference_pass_that_is_stopped_goes_on_where_it_was(
    inputs, trained, tmp_path, passes, monkeypatch
):
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "data.val_files=[]")
    with monkeypatch.context() as changed:
        changed.setattr(PreferenceWorker, "evaluate_reference", interrupted(lambda: len(passes) == 3))
        with pytest.raises(KeyboardInterrupt):
            train("dpo", options)
    assert load_file(tmp_path / CACHE)["ref_chosen_log_prob"].isfinite().sum() == sum(passes) == 12
    train("dpo", options)
    assert sum(passes) == 24
    assert not (tmp_path / "previous_1").exists()
    now, whole = load_file(tmp_path / CACHE), load_file(inputs / "run" / CACHE)
    assert all(torch.equal(now[name], column) for name, column in whole.items())


@pytest.mark.parametrize("place", ["val", "tracker"])
def test_a_whole_reference_pass_is_kept_though_the_run_cannot_start(
    inputs, tmp_path, passes, monkeypatch, place
):
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "trainer.test_freq=-1")
    with monkeypatch.context() as changed:
        if place == "val":
            changed.setattr(PreferenceWorker, "evaluate_reference", interrupted(lambda: sum(passes) == 24))
        else:  # no login
            changed.setattr("strop.trainer.loop.Tracking", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train("dpo", options)
    passes.clear()
    train("dpo", options)
    assert sum(passes) == (10 if place == "val" else 0)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    reference = Reference("", "", {name: torch.zeros(10_000) for name in REFERENCE_INPUTS})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # EFBIG stands for ENOSPC
    try:
        with pytest.raises(OSError) as caught:
            reference.save(tmp_path / CACHE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / CACHE)


@pytest.mark.fast("flipped")
@pytest.mark.parametrize("damage", ["flipped", "dtype", "doubled", "earlier"])
def test_a_damaged_reference_is_computed_again(inputs, tmp_path, passes, caplog, damage):
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "data.val_files=[]")
    train("dpo", options)
    whole = load_file(tmp_path / CACHE)
    with safe_open(tmp_path / CACHE, framework="pt") as file:
        metadata = file.metadata()
    changed = {name: column.clone() for name, column in whole.items()}
    if damage == "flipped":
        changed["ref_chosen_log_prob"].view(torch.int32)[3] ^= 1 << 22
    elif damage == "earlier":  # a file without a digest
        changed["ref_chosen_log_prob"][3] += 1
        metadata.pop("digest", None)
    else:
        change = {"dtype": torch.Tensor.bfloat16, "doubled": lambda column: column.repeat_interleave(2)}
        changed = {name: change[damage](column).contiguous() for name, column in changed.items()}
    save_file(changed, tmp_path / CACHE, metadata=metadata)
    passes.clear()
    with caplog.at_level(logging.WARNING):
        train("dpo", [*options, "trainer.total_training_steps=6", "trainer.resume_mode=auto"])
    assert sum(passes) == 24
    assert CACHE in caplog.text
    now = load_file(tmp_path / CACHE)
    assert all(torch.equal(now[name], column) for name, column in whole.items())


def test_only_pairs_that_the_run_visits_get_a_reference(inputs, tmp_path, passes):
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "data.val_files=[]")
    train("dpo", [*options, "trainer.total_training_steps=2"])
    assert sum(passes) == 16
    cached = load_file(tmp_path / CACHE)["ref_chosen_log_prob"]
    train("dpo", [*options, "trainer.total_training_steps=4"])
    assert sum(passes) == 24
    now = load_file(tmp_path / CACHE)["ref_chosen_log_prob"]
    assert now.isfinite().all()
    known = cached.isfinite()
    assert torch.equal(now[known], cached[known])


def test_a_loss_without_reference_computes_none(inputs, tmp_path, passes):
    train("dpo", overrides(inputs, tmp_path, "update.loss=simpo", "trainer.test_freq=-1"))
    assert passes == []
    assert not (tmp_path / "reference_log_probs").exists()


@pytest.mark.slow
def test_a_resume_with_another_model_is_an_error(inputs, trained, tmp_path):
    options = overrides(inputs, tmp_path / "run", "trainer.save_freq=2")
    train("dpo", options)
    tiny_model.save(tmp_path / "other", hidden=32, seed=7)
    more = [*options, f"model.path={tmp_path / 'other'}", "trainer.total_training_steps=6"]
    with pytest.raises(ConfigError, match=naming("trains something else", "model.path", "resume_mode")):
        train("dpo", more)
    checkpoint = tmp_path / "run" / "global_step_2"
    elsewhere = [f"trainer.resume_mode={checkpoint}", f"trainer.default_local_dir={tmp_path / 'new'}"]
    train("dpo", overrides(inputs, tmp_path / "new", "trainer.total_training_steps=1"))
    kept = names(tmp_path / "new")
    with pytest.raises(CheckpointError, match=naming("reference of the checkpoint")):
        train("dpo", [*more, *elsewhere])
    assert names(tmp_path / "new") == kept  # a run that is refused moves nothing
    assert train("dpo", [*more, "trainer.resume_mode=disable"]).global_step == 6


def names(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_without_a_checkpoint_another_model_is_a_new_run_with_its_own_reference(inputs, tmp_path, passes):
    options = overrides(inputs, tmp_path / "run", "data.val_files=[]", "trainer.total_training_steps=3")
    train("dpo", options)
    tiny_model.save(tmp_path / "other", hidden=32, seed=7)
    train("dpo", [*options, f"model.path={tmp_path / 'other'}"])
    assert sum(passes) == 24 + 24
    before, now = (load_file(tmp_path / "run" / place / CACHE) for place in ("previous_1", ""))
    assert not torch.equal(before["ref_chosen_log_prob"], now["ref_chosen_log_prob"])


@pytest.mark.fast("simpo")
@pytest.mark.parametrize("loss", ["ipo", "hinge", "simpo", "orpo"])
def test_no_layout_changes_a_parameter(inputs, tmp_path, loss):
    """test_supervised.py does the same with dpo."""
    options = (f"update.loss={loss}", "update.nll_coef=0.2", "trainer.test_freq=-1", "update.optim.lr=1e-3")
    train("dpo", overrides(inputs, tmp_path / "padded", *options, "model.use_remove_padding=False"))
    packed = (
        "model.use_remove_padding=True",
        "update.use_dynamic_bsz=True",
        "update.max_token_len_per_gpu=36",
    )
    train("dpo", overrides(inputs, tmp_path / "packed", *options, *packed))
    require_equal_weights(tmp_path / "packed", final_weights(tmp_path / "padded"))


def test_settings_that_a_loss_does_not_take_are_warnings(inputs, tmp_path):
    def warnings(*settings):
        return check(load_tree(DPO, overrides(inputs, tmp_path, *settings))).warnings

    assert warnings("update.loss=simpo", "update.gamma=0.5", "update.beta=2") == []
    assert warnings("update.loss=dpo", "update.label_smoothing=0.1") == []
    (line,) = warnings("update.gamma=0.5")
    assert mentions(line, "no effect", "update.gamma=0.5")
    (line,) = warnings("update.loss=ipo", "update.label_smoothing=0.1")
    assert mentions(line, "no effect", "update.label_smoothing=0.1")


def test_check_reads_the_configuration_and_the_data_of_the_command(inputs, tmp_path, capsys):
    options = overrides(inputs, tmp_path)
    assert main(["check", "--command", "dpo", *options]) == 0
    assert capsys.readouterr().out.startswith("no errors")
    assert main(["check", "--command", "dpo", *options, "update.loss=dop"]) == 2
    assert mentions(capsys.readouterr().out, "update.loss=dop", "did you mean dpo")
    assert main(["check", "--command", "dpo", *options, "data.chosen_key=best"]) == 2
    assert mentions(capsys.readouterr().out, "best", "data.chosen_key")
    with pytest.raises(ConfigError, match=naming("update.label_smoothing")):
        load_tree(DPO, ["update.label_smoothing=0.5"])


def test_the_worker_of_a_group_gives_log_probs_of_pairs(inputs, trained):
    assert isinstance(trained.group, LocalWorkerGroup)
    batch = next(iter(trained.val_loader))
    assert trained.group.evaluate(batch).batch["chosen_log_prob"].shape == (4,)

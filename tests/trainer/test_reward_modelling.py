"""strop train-rm: its figures, centring and refusals; test_supervised.py trains as transformers does."""

from __future__ import annotations

import json
import math
import random
import shutil
from itertools import pairwise, product

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from strop.algorithms.preference import bradley_terry_loss, calibration, pairwise_accuracy
from strop.config.load import load_tree
from strop.config.trees import REWARD_MODELLING
from strop.data.answers import pair_batch
from strop.errors import ConfigError, DataError
from strop.models.loader import load_scorer
from strop.models.scorer import PairScorer, SequenceScorer
from strop.trainer.supervised import RewardModelTrainer, base, build
from strop.workers.supervised import pair_objective

from messages import mentions, naming
from supervised_runs import final_weights, make_inputs, metrics, overrides, row, train, write_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trained(inputs):
    """Four steps with packed micro-batches of 8 pairs."""
    return train("train-rm", overrides(inputs, inputs / "run"))


def test_the_loss_is_minus_log_sigmoid_of_the_margin_and_ties_count_half():
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0.0, 2.0, 1.0])
    expected = [-math.log(1 / (1 + math.exp(-margin))) for margin in (2.0, -2.0, 0.0)]
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(expected)
    assert pairwise_accuracy(chosen - rejected).tolist() == [1.0, 0.0, 0.5]


def test_calibration_compares_confidence_with_accuracy_in_bins_of_equal_size():
    margins = torch.tensor([math.log(3.0)] * 4 + [math.log(9.0)] * 4)  # confidences 0.75 and 0.9
    signs = torch.tensor([1, 1, 1, -1, 1, 1, -1, -1])
    found = calibration(margins * signs, bins=2)
    assert found.confidence == pytest.approx([0.75, 0.9])
    assert found.accuracy == pytest.approx([0.75, 0.5])
    assert found.error == pytest.approx(0.5 * 0.0 + 0.5 * 0.4)
    assert len(calibration(torch.tensor([1.0, 2.0])).accuracy) == 2  # fewer pairs than bins


def answer_scores(model, dataset, numbers) -> torch.Tensor:
    """Return transformers' scores of the (chosen, rejected) answers, each in a pass of its own."""
    scores = [
        [
            model(torch.cat([dataset[number]["input_ids"], dataset[number][name]])[None]).logits.item()
            for name in ("chosen", "rejected")
        ]
        for number in numbers
    ]
    return torch.tensor(scores)


@pytest.fixture(scope="module")
def raw_scores(inputs, trained):
    """Scores of the validation pairs by the exported model, as transformers loads it."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "run" / "final_model")
    assert model.config.num_labels == 1
    dataset = trained.val_loader.dataset
    return answer_scores(model, dataset, range(len(dataset)))


def test_the_exported_model_gives_scores_centred_on_validation(inputs, trained, raw_scores):
    scorer = SequenceScorer(load_scorer(inputs / "run" / "final_model", fresh_head_seed=None))
    dataset, centred = trained.val_loader.dataset, []
    for number, name in product(range(len(dataset)), ("chosen", "rejected")):
        ids = torch.cat([dataset[number]["input_ids"], dataset[number][name]])[None]
        mask = torch.ones_like(ids)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
        with torch.no_grad():
            centred.append(scorer(batch)["rm_scores"].item())
    config, mean = scorer.hugging_face_model.config, raw_scores.mean().item()
    assert config.strop_reward_mean == pytest.approx(mean, abs=1e-5)
    assert config.strop_reward_std == pytest.approx(raw_scores.std(correction=0).item(), abs=1e-4)
    assert centred == pytest.approx((raw_scores.flatten() - mean).tolist(), abs=1e-5)
    assert abs(mean) > 1e-3  # there was something to subtract


def test_metrics_agree_with_the_scores_of_the_exported_model(inputs, raw_scores):
    last = metrics(inputs / "run")[-1]
    margins = raw_scores[:, 0] - raw_scores[:, 1]
    assert last["val/margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert last["val/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert last["val/accuracy/even"] == pytest.approx((margins[::2] > 0).float().mean().item())
    assert last["val/loss"] == pytest.approx(torch.log1p(torch.exp(-margins)).mean().item(), abs=1e-5)
    deciles = [last[f"val/confidence/{decile}"] for decile in range(1, 11)]
    assert all(first <= second for first, second in pairwise(deciles))


def test_the_tokens_of_a_step_are_those_of_prompts_and_both_answers(inputs, trained):
    dataset = trained.train_loader.dataset
    rows = next(iter(build(RewardModelTrainer, trained.config).train_loader.batches))
    fields = ("input_ids", "chosen", "rejected")
    tokens = sum(len(dataset[number][name]) for number in rows for name in fields)
    first = json.loads((inputs / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["perf/total_num_tokens"] == tokens


def test_an_update_forgets_the_mean_of_the_model_before_it(inputs, tmp_path):
    train("train-rm", overrides(inputs, tmp_path, "trainer.save_freq=1", "trainer.test_freq=2"))
    saved = [
        json.loads((tmp_path / f"global_step_{step}/reward_model/huggingface/config.json").read_text())
        for step in (1, 2, 3, 4)
    ]
    assert ["strop_reward_mean" in config for config in saved] == [False, True, False, True]


def test_a_run_that_is_complete_exports_again_with_its_mean(inputs, tmp_path):
    """Its worker has the weights of the checkpoint, and no validation follows."""
    options = overrides(inputs, tmp_path, "trainer.save_freq=2", "trainer.async_save=True")
    train("train-rm", options)
    first = json.loads((tmp_path / "final_model" / "config.json").read_text())
    shutil.rmtree(tmp_path / "final_model")
    train("train-rm", options)
    again = json.loads((tmp_path / "final_model" / "config.json").read_text())
    assert again["strop_reward_mean"] == first["strop_reward_mean"]
    assert again == first


def test_without_validation_files_the_mean_is_of_training_pairs(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_FINAL_ROWS", 3)
    options = overrides(inputs, tmp_path, "data.val_files=[]", "trainer.total_epochs=1")
    dataset = train("train-rm", [*options, "trainer.total_training_steps=null"]).train_loader.dataset
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final_model")
    expected = answer_scores(model, dataset, range(3)).mean().item()
    assert model.config.strop_reward_mean == pytest.approx(expected, abs=1e-5)
    assert metrics(tmp_path)[-1]["final/score_mean"] == pytest.approx(expected, abs=1e-5)


def test_centering_adds_the_squared_sum_of_scores(inputs, tmp_path):
    """At step 0 the loss with coefficient c is the plain one plus c x mean((chosen + rejected)^2)."""
    one = ("trainer.total_training_steps=1", "trainer.test_freq=-1")
    runs = {}
    for coefficient in (0.0, 0.5):
        setting = f"update.center_rewards_coefficient={coefficient}"
        trainer = train("train-rm", overrides(inputs, tmp_path / str(coefficient), *one, setting))
        runs[coefficient] = metrics(tmp_path / str(coefficient))[0]["train/loss"]
    fresh = load_scorer(inputs / "model", fresh_head_seed=1).eval()
    batch_rows = next(iter(build(RewardModelTrainer, trainer.config).train_loader.batches))
    sums = answer_scores(fresh, trainer.train_loader.dataset, batch_rows).sum(dim=1)
    expected = 0.5 * sums.square().mean().item()
    assert runs[0.5] - runs[0.0] == pytest.approx(expected, rel=1e-4)


def test_a_reward_model_is_trained_further_from_its_own_head(inputs, trained, tmp_path):
    options = overrides(inputs, tmp_path, f"model.path={inputs / 'run' / 'final_model'}", "update.optim.lr=0")
    train("train-rm", options)
    torch.testing.assert_close(
        final_weights(tmp_path)["score.weight"], final_weights(inputs / "run")["score.weight"]
    )


@pytest.mark.parametrize(
    ("number", "field", "value", "parts"),
    [
        (5, "rejected", None, ["null"]),
        (3, "chosen", "1234567", ["8 tokens", "data.max_response_length", "6"]),
    ],
)
def test_bad_rows_are_named_by_file_row_and_field(inputs, tmp_path, number, field, value, parts):
    draw = random.Random(0)
    rows = [row(draw, index) for index in range(8)]
    rows[number][field] = value
    files = f"data.train_files={write_rows(tmp_path / 'bad.parquet', rows)}"
    options = overrides(inputs, tmp_path / "run", files)
    with pytest.raises(DataError, match=naming("bad.parquet", f"row {number}", f"field {field}", *parts)):
        train("train-rm", options)


def test_wrong_settings_are_reported_together_before_a_model_is_loaded(inputs, tmp_path):
    options = overrides(
        inputs,
        tmp_path,
        "model.path=/nowhere/model",
        "update.use_dynamic_bsz=True",
        "update.max_token_len_per_gpu=31",
        "trainer.logger=[teleprinter]",
    )
    with pytest.raises(ConfigError) as caught:
        build(RewardModelTrainer, load_tree(REWARD_MODELLING, options))
    assert mentions(caught.value, "model.path=/nowhere/model", "update.max_token_len_per_gpu=31", "32")
    assert mentions(caught.value, "teleprinter")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_row_that_is_padding_is_scored_alike_packed_and_padded(inputs, implementation):
    """The row that fills up a rank's share has no chosen tokens: it scores the prompt, without a gradient."""
    answers = ([6, 7, 8], [9, 1], [5, 6, 1]), ([6, 7], [9, 8, 1], [1])
    names = ("input_ids", "chosen", "rejected")
    rows = [dict(zip(names, map(torch.tensor, ids), strict=True), data_source="a") for ids in answers]
    columns = pair_batch(rows, pad_token_id=0, max_prompt_length=4, max_response_length=5).batch
    columns["response_mask"][1] = 0
    found = {}
    for packed in (False, True):
        options = {"fresh_head_seed": 1, "attn_implementation": implementation}
        model = load_scorer(inputs / "model", **options).train()
        outputs = PairScorer(model, packed=packed)(columns)
        loss, _ = pair_objective(n_pairs=1, center_coefficient=0.1)(outputs, columns)
        loss.backward()
        gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found[packed] = (outputs["chosen_scores"], outputs["rejected_scores"], loss, gradients)
    for ours, theirs in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)

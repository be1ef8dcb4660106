"""strop train-rm: against hand-computed figures, plain transformers training, and other layouts of a run."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.algorithms.preference import bradley_terry_loss, calibration, pairwise_accuracy
from strop.config.load import load_tree
from strop.config.trees import REWARD_MODELLING
from strop.data.answers import pair_batch
from strop.errors import ConfigError, DataError
from strop.models.loader import fresh_head, load_scorer
from strop.models.scorer import PairScorer, SequenceScorer
from strop.trainer import supervised as reward_modelling
from strop.trainer.supervised import RewardModelTrainer, build
from strop.workers.supervised import pair_objective

from messages import mentions, naming
from supervised_runs import final_weights, make_inputs, metrics, overrides, row, train, write_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trained(inputs):
    """Four steps with padded micro-batches of 8 pairs."""
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


def plain_training(inputs, steps):
    """The same steps in transformers and torch: each answer by itself, no padding, no micro-batches."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    trainer = build(RewardModelTrainer, load_tree(REWARD_MODELLING, overrides(inputs, inputs / "plain")))
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.score.weight.data.copy_(fresh_head(32, trainer.config.trainer.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)
    dataset, batches = trainer.train_loader.dataset, trainer.train_loader.batches
    for step, rows in zip(range(steps), batches, strict=False):
        progress = step / steps  # int(0.1 x 4) = 0 steps of warm-up
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * progress))
        losses = []
        for number in rows:
            fields = dataset[number]
            scores = [
                model(torch.cat([fields["input_ids"], fields[name]])[None]).logits[0, 0]
                for name in ("chosen", "rejected")
            ]
            losses.append(-torch.nn.functional.logsigmoid(scores[0] - scores[1]))
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_parameters_are_those_of_plain_transformers_training(inputs, trained):
    ours, theirs = final_weights(inputs / "run"), plain_training(inputs, 4)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight.detach(), atol=1e-6, rtol=1e-5)


LAYOUTS = {
    "packed": ("model.use_remove_padding=True",),
    "micro-batches of 3": ("update.micro_batch_size_per_gpu=3",),
    "packed by tokens": (
        "model.use_remove_padding=True",
        "update.use_dynamic_bsz=True",
        "update.max_token_len_per_gpu=40",
    ),
    "with checkpointed activations": ("model.enable_gradient_checkpointing=True",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_parameter(inputs, trained, tmp_path, layout):
    train("train-rm", overrides(inputs, tmp_path, *LAYOUTS[layout]))
    ours, theirs = final_weights(tmp_path), final_weights(inputs / "run")
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=1e-5)


def test_the_exported_model_gives_centred_scores_to_strop_and_raw_ones_to_transformers(inputs, trained):
    folder = inputs / "run" / "final_model"
    raw = AutoModelForSequenceClassification.from_pretrained(folder)
    assert raw.config.num_labels == 1
    scorer = SequenceScorer(load_scorer(folder, fresh_head_seed=None))
    centred, uncentred = [], []
    dataset = trained.val_loader.dataset
    with torch.no_grad():
        for number in range(len(dataset)):
            fields = dataset[number]
            for name in ("chosen", "rejected"):
                ids = torch.cat([fields["input_ids"], fields[name]])[None]
                mask = torch.ones_like(ids)
                batch = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
                centred.append(scorer(batch)["rm_scores"].item())
                uncentred.append(raw(ids).logits.item())
    mean = sum(uncentred) / len(uncentred)
    assert raw.config.strop_reward_mean == pytest.approx(mean, abs=1e-5)
    assert raw.config.strop_reward_std == pytest.approx(
        torch.tensor(uncentred).std(correction=0).item(), abs=1e-4
    )
    assert centred == pytest.approx([score - mean for score in uncentred], abs=1e-5)
    assert abs(mean) > 1e-3  # there was something to take off


def test_metrics_agree_with_the_scores_of_the_exported_model(inputs, trained):
    last = metrics(inputs / "run")[-1]
    dataset = trained.val_loader.dataset
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "run" / "final_model")
    with torch.no_grad():
        margins = []
        for number in range(len(dataset)):
            fields = dataset[number]
            chosen, rejected = (
                model(torch.cat([fields["input_ids"], fields[name]])[None]).logits.item()
                for name in ("chosen", "rejected")
            )
            margins.append(chosen - rejected)
    assert last["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert last["val/accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))
    even = margins[::2]
    assert last["val/accuracy/even"] == pytest.approx(sum(margin > 0 for margin in even) / len(even))
    assert last["val/loss"] == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins), abs=1e-5
    )
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


def test_without_validation_files_the_mean_is_of_the_first_training_pairs(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_modelling, "_CALIBRATION_PAIRS", 3)
    options = overrides(inputs, tmp_path, "data.val_files=[]", "trainer.total_training_steps=1")
    dataset = train("train-rm", options).train_loader.dataset
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final_model")
    with torch.no_grad():
        scores = [
            model(torch.cat([dataset[number]["input_ids"], dataset[number][name]])[None]).logits.item()
            for number in range(3)
            for name in ("chosen", "rejected")
        ]
    assert model.config.strop_reward_mean == pytest.approx(sum(scores) / len(scores), abs=1e-5)


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
    dataset, sums = trainer.train_loader.dataset, []
    with torch.no_grad():
        for number in batch_rows:
            fields = dataset[number]
            sums.append(
                sum(
                    fresh(torch.cat([fields["input_ids"], fields[name]])[None]).logits.item()
                    for name in ("chosen", "rejected")
                )
            )
    expected = 0.5 * sum(total**2 for total in sums) / len(sums)
    assert runs[0.5] - runs[0.0] == pytest.approx(expected, rel=1e-4)


def test_a_reward_model_is_trained_further_from_its_own_head(inputs, trained, tmp_path):
    options = overrides(inputs, tmp_path, f"model.path={inputs / 'run' / 'final_model'}", "update.optim.lr=0")
    train("train-rm", options)
    torch.testing.assert_close(
        final_weights(tmp_path)["score.weight"], final_weights(inputs / "run")["score.weight"]
    )


def test_resume_is_exact(inputs, trained, tmp_path):
    straight = metrics(inputs / "run")
    train("train-rm", overrides(inputs, tmp_path, "trainer.save_freq=2"))
    for name in ("global_step_4", "final_model"):  # as if it had died after the checkpoint of step 2
        assert not (tmp_path / "final_model").exists()
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / f"{name}.lost")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    resumed = train("train-rm", overrides(inputs, tmp_path, "trainer.save_freq=2"))
    assert resumed.group.weights_hash() == trained.group.weights_hash()
    assert metrics(tmp_path) == straight


def test_bad_rows_are_named_by_file_row_and_field(inputs, tmp_path):
    draw = random.Random(0)
    rows = [row(draw, index) for index in range(8)]
    rows[5]["rejected"] = None
    file = write_rows(tmp_path / "bad.parquet", rows)
    options = overrides(inputs, tmp_path / "run", f"data.train_files={file}")
    with pytest.raises(DataError, match=naming("bad.parquet", "row 5", "field rejected", "null")):
        train("train-rm", options)
    long = [row(draw, index) for index in range(8)]
    long[3]["chosen"] = "1234567"
    file = write_rows(tmp_path / "long.parquet", long)
    options = overrides(inputs, tmp_path / "run", f"data.train_files={file}", "data.filter_overlong=False")
    with pytest.raises(
        DataError, match=naming("row 3", "field chosen", "8 tokens", "data.max_response_length", "6")
    ):
        train("train-rm", options)


def test_wrong_settings_are_told_together_before_a_model_is_loaded(inputs, tmp_path):
    with pytest.raises(ConfigError, match=naming("update.center_rewards_coefficient")):
        load_tree(REWARD_MODELLING, ["update.center_reward_coefficient=1"])
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
    text = str(caught.value)
    assert mentions(text, "model.path=/nowhere/model")
    assert "both sequences of a pair" in text
    assert mentions(text, "32")
    assert "teleprinter" in text


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_row_that_is_padding_is_scored_alike_packed_and_padded(inputs, implementation):
    """What evens out ranks has no chosen tokens: its score is the prompt's, and its gradient nothing."""
    rows = [
        {
            "input_ids": torch.tensor([6, 7, 8]),
            "chosen": torch.tensor([9, 1]),
            "rejected": torch.tensor([5, 6, 1]),
        },
        {"input_ids": torch.tensor([6, 7]), "chosen": torch.tensor([9, 8, 1]), "rejected": torch.tensor([1])},
    ]
    rows = [{**fields, "data_source": "a"} for fields in rows]
    columns = pair_batch(rows, pad_token_id=0, max_prompt_length=4, max_response_length=5).batch
    columns["response_mask"][1] = 0
    found = {}
    for packed in (False, True):
        kernel = "sdpa" if packed else implementation
        model = load_scorer(inputs / "model", fresh_head_seed=1, attn_implementation=kernel).train()
        outputs = PairScorer(model, packed=packed)(columns)
        loss, _ = pair_objective(n_pairs=1, center_coefficient=0.1)(outputs, columns)
        loss.backward()
        gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found[packed] = (outputs["chosen_scores"], outputs["rejected_scores"], loss, gradients)
    for ours, theirs in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)

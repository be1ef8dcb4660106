"""strop sft: against plain transformers training, the tokens of RL, and other layouts of the same run."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.config.load import load_tree
from strop.config.trees import SFT
from strop.data.answers import AnsweredDataset, response_batch
from strop.data.rl_dataset import RLHFDataset
from strop.errors import ConfigError, DataError
from strop.trainer.supervised import SftTrainer, build

from messages import mentions, naming
from supervised_runs import final_weights, make_inputs, metrics, overrides, row, train, write_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("responses"))


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return AutoTokenizer.from_pretrained(inputs / "model")


@pytest.fixture(scope="module")
def trained(inputs):
    """Four steps with padded micro-batches of 8 rows."""
    return train("sft", overrides(inputs, inputs / "run"))


def response_loss(model, fields):
    """The sum of the negative log-likelihoods of a row's response tokens, by transformers' logits."""
    prompt, response = fields["input_ids"], fields["response"]
    logits = model(torch.cat([prompt, response])[None]).logits[0]
    predicted = logits[len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(predicted, response, reduction="sum")


def test_prompts_are_those_of_reinforcement_learning_and_responses_end(inputs, tokenizer):
    options = {"prompt_key": "prompt", "max_prompt_length": 10}
    file = inputs / "train.parquet"
    answered = AnsweredDataset(
        file, tokenizer, answer_keys={"response": "response"}, max_response_length=6, **options
    )
    prompts = RLHFDataset(file, tokenizer, **options)
    assert len(answered) == len(prompts) == 24
    for number in range(24):
        ids = answered[number]["input_ids"]
        assert torch.equal(ids, prompts[number]["input_ids"])
        response = answered[number]["response"].tolist()
        assert response[-1] == tokenizer.eos_token_id
        whole = tokenizer.decode([*ids, *response[:-1]]).replace(" ", "")
        assert eval(whole.split("<user>")[1].replace("=<assistant>", "==")), whole


def test_batches_stand_as_rollouts_do(inputs, tokenizer):
    rows = [
        {"input_ids": torch.tensor([5, 6]), "response": torch.tensor([7, 8, 1]), "data_source": "a"},
        {"input_ids": torch.tensor([5]), "response": torch.tensor([1]), "data_source": "b"},
    ]
    batch = response_batch(rows, pad_token_id=0, max_prompt_length=3, max_response_length=4).batch
    assert batch["input_ids"].tolist() == [[0, 5, 6, 7, 8, 1, 0], [0, 0, 5, 1, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_parameters_are_those_of_plain_transformers_training(inputs, trained):
    trainer = build(SftTrainer, load_tree(SFT, overrides(inputs, inputs / "plain")))
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)
    dataset, losses = trainer.train_loader.dataset, []
    for step, rows in zip(range(4), trainer.train_loader.batches, strict=False):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 4))
        n_tokens = sum(len(dataset[number]["response"]) for number in rows)
        loss = sum(response_loss(model, dataset[number]) for number in rows) / n_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ours = final_weights(inputs / "run")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.detach(), atol=1e-6, rtol=1e-5)
    assert [line["train/loss"] for line in metrics(inputs / "run")] == pytest.approx(losses, abs=1e-5)


def test_validation_weighs_every_token_alike(inputs, trained):
    model = AutoModelForCausalLM.from_pretrained(inputs / "run" / "final_model")
    dataset = trained.val_loader.dataset
    with torch.no_grad():
        loss = sum(response_loss(model, dataset[number]).item() for number in range(len(dataset)))
    loss /= sum(len(dataset[number]["response"]) for number in range(len(dataset)))
    last = metrics(inputs / "run")[-1]
    assert last["val/loss"] == pytest.approx(loss, abs=1e-5)
    assert last["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


LAYOUTS = {
    "packed": ("model.use_remove_padding=True",),
    "micro-batches of 3": ("update.micro_batch_size_per_gpu=3",),
    "packed by tokens": (
        "model.use_remove_padding=True",
        "update.use_dynamic_bsz=True",
        "update.max_token_len_per_gpu=20",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_parameter(inputs, trained, tmp_path, layout):
    train("sft", overrides(inputs, tmp_path, *LAYOUTS[layout]))
    ours, theirs = final_weights(tmp_path), final_weights(inputs / "run")
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=1e-5)


def test_resume_is_exact(inputs, trained, tmp_path):
    train("sft", overrides(inputs, tmp_path, "trainer.save_freq=2"))
    (tmp_path / "global_step_4").rename(tmp_path / "lost")  # as if it had died after the checkpoint before
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    resumed = train("sft", overrides(inputs, tmp_path, "trainer.save_freq=2"))
    assert resumed.group.weights_hash() == trained.group.weights_hash()
    assert metrics(tmp_path) == metrics(inputs / "run")


def test_validation_alone_measures_without_training_files(inputs, trained, tmp_path):
    settings = ("trainer.val_only=True", "data.train_files=/no.parquet")
    path = f"model.path={inputs / 'run' / 'final_model'}"
    train("sft", overrides(inputs, tmp_path, *settings, path))
    (line,) = metrics(tmp_path)
    last = metrics(inputs / "run")[-1]
    assert line == {"step": 0, **{name: pytest.approx(last[name]) for name in ("val/loss", "val/perplexity")}}


def test_validation_alone_goes_on_from_a_checkpoint(inputs, trained, tmp_path):
    train("sft", overrides(inputs, tmp_path, "trainer.save_freq=2"))
    only = ("trainer.val_only=True", "data.train_files=/no.parquet")
    looked = train("sft", overrides(inputs, tmp_path, *only))
    assert looked.global_step == 4
    assert looked.group.weights_hash() == trained.group.weights_hash()


def test_validation_alone_needs_something_to_validate_on(inputs, tmp_path):
    settings = ("trainer.val_only=True", "data.val_files=[]")
    with pytest.raises(ConfigError, match=naming("data.val_files")):
        build(SftTrainer, load_tree(SFT, overrides(inputs, tmp_path, *settings)))


def test_rows_that_are_too_long_are_dropped_counted_or_cut(inputs, tokenizer, tmp_path, caplog):
    draw = random.Random(0)
    rows = [row(draw, index) for index in range(4)]
    rows[1]["prompt"] = [{"role": "user", "content": "1" * 20}]
    rows[2]["response"] = "12345678"
    file = write_rows(tmp_path / "long.parquet", rows)
    options = {
        "prompt_key": "prompt",
        "answer_keys": {"response": "response"},
        "max_prompt_length": 10,
        "max_response_length": 6,
    }
    assert len(AnsweredDataset(file, tokenizer, **options)) == 2
    assert "dropped 2 of 4 rows" in caplog.text
    with pytest.raises(DataError, match=naming("long.parquet", "row 1", "field prompt", "22 tokens")):
        AnsweredDataset(file, tokenizer, filter_overlong=False, **options)
    cut = AnsweredDataset(file, tokenizer, filter_overlong=False, truncation="left", **options)
    assert tokenizer.decode(cut[1]["input_ids"]) == "1" * 9 + "<assistant>"
    assert tokenizer.decode(cut[2]["response"]) == "123456"  # and no end: it is not where the answer ends


def test_a_missing_column_is_named_with_its_key(inputs, tmp_path):
    options = overrides(inputs, tmp_path, "data.response_key=answer")
    with pytest.raises(DataError, match=naming("column 'answer'", "data.response_key")):
        build(SftTrainer, load_tree(SFT, options))


def test_an_unknown_key_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=naming("update.optim.learning")):
        load_tree(SFT, ["update.optim.learning=1"])
    with pytest.raises(
        ConfigError, match=r"optim\.lr: unknown key; did you mean update\.optim\.lr\?|optim: unk"
    ):
        load_tree(SFT, ["optim.lr=1"])


def test_what_has_no_effect_is_told_before_a_model_is_loaded(inputs, tmp_path, caplog):
    build(SftTrainer, load_tree(SFT, overrides(inputs, tmp_path, "trainer.max_restarts=3")))
    assert mentions(caplog.text, "trainer.max_restarts=3")

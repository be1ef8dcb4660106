"""strop sft, train-rm and dpo: against plain transformers training, and other layouts of the same run."""

from __future__ import annotations

import json
import math
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import strop
from strop.checkpoint.folder import iteration_of
from strop.config.load import load_tree
from strop.config.trees import SFT
from strop.data.answers import AnsweredDataset, response_batch
from strop.data.prompts import PromptFormat
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.errors import ConfigError, DataError, ModelError
from strop.models.loader import fresh_head
from strop.trainer.supervised import SftTrainer, build

import tiny_model
from byte_tokenizer import byte_tokenizer
from messages import mentions, naming
from supervised_runs import (
    KINDS,
    final_weights,
    make_inputs,
    metrics,
    overrides,
    require_equal_weights,
    row,
    train,
    write_rows,
)

LAYOUTS = {
    "padded": ("model.use_remove_padding=False",),
    "checkpointing": ("model.enable_gradient_checkpointing=True",),
    "micro-batches of 3": ("update.micro_batch_size_per_gpu=3",),
    "by tokens": ("update.use_dynamic_bsz=True", "update.max_token_len_per_gpu=36"),
}


class Straight(NamedTuple):
    """A run of four steps with packed micro-batches of 8 rows."""

    kind: str
    run: Path
    trainer: Any


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def sft(inputs):
    return Straight("sft", inputs / "sft", train("sft", overrides(inputs, inputs / "sft")))


@pytest.fixture(scope="module")
def reward_model(inputs):
    return Straight("train-rm", inputs / "rm", train("train-rm", overrides(inputs, inputs / "rm")))


@pytest.fixture(scope="module")
def dpo(inputs):
    return Straight("dpo", inputs / "dpo", train("dpo", overrides(inputs, inputs / "dpo")))


@pytest.fixture(params=["sft", "reward_model", "dpo"])
def straight(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return AutoTokenizer.from_pretrained(inputs / "model")


def response_loss(model, rows):
    """Mean negative log-likelihood of the response tokens of all rows, by transformers' logits."""
    total = 0.0
    for fields in rows:
        prompt, response = fields["input_ids"], fields["response"]
        logits = model(torch.cat([prompt, response])[None]).logits[0]
        predicted = logits[len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(predicted, response, reduction="sum")
    return total / sum(len(fields["response"]) for fields in rows)


def pair_loss(model, rows):
    """Mean of -log sigmoid(chosen - rejected), each answer in a pass of its own."""

    def score(fields, name):
        return model(torch.cat([fields["input_ids"], fields[name]])[None]).logits[0, 0]

    margins = [score(fields, "chosen") - score(fields, "rejected") for fields in rows]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


def preference_loss(model, rows, reference):
    """Mean of -log sigmoid of the difference of log-ratios times 0.1, each answer in a pass of its own."""

    def log_ratio(fields, name):
        prompt, answer = fields["input_ids"], fields[name]
        with torch.no_grad():
            before = -response_loss(reference, [{"input_ids": prompt, "response": answer}])
        now = -response_loss(model, [{"input_ids": prompt, "response": answer}])
        return (now - before) * len(answer)

    margins = [0.1 * (log_ratio(fields, "chosen") - log_ratio(fields, "rejected")) for fields in rows]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


def test_parameters_and_losses_are_those_of_plain_transformers_training(inputs, straight):
    if straight.kind == "sft":
        model, loss_of = AutoModelForCausalLM.from_pretrained(inputs / "model"), response_loss
    elif straight.kind == "dpo":
        model, reference = (AutoModelForCausalLM.from_pretrained(inputs / "model") for _ in range(2))
        loss_of = partial(preference_loss, reference=reference)
    else:
        loss_of = pair_loss
        model = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=1)
        model.config.pad_token_id = 0
        model.score.weight.data.copy_(fresh_head(32, straight.trainer.config.trainer.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-3)
    loader, losses = build(type(straight.trainer), straight.trainer.config).train_loader, []
    for step, numbers in zip(range(4), loader.batches, strict=False):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 4))
        loss = loss_of(model, [loader.dataset[number] for number in numbers])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    require_equal_weights(straight.run, {name: w.detach() for name, w in model.named_parameters()})
    assert [line["train/loss"] for line in metrics(straight.run)] == pytest.approx(losses, abs=1e-5)


def test_a_run_has_its_model_with_a_head_or_adapters(inputs, straight, tmp_path):
    train(straight.kind, overrides(inputs, tmp_path, "model.lora_rank=2"))
    for run, is_whole in ((straight.run, True), (tmp_path, False)):
        model, _ = strop.Run(run).model()
        assert hasattr(model, "score") == (straight.kind == "train-rm")
        found = model.state_dict()
        if is_whole:
            assert all(found[name].equal(weight) for name, weight in final_weights(run).items())
        else:
            before = AutoModelForCausalLM.from_pretrained(inputs / "model").state_dict()
            name = "model.layers.0.mlp.up_proj.weight"
            assert 0 < torch.linalg.matrix_rank(found[name] - before[name], atol=1e-6) <= 2


@pytest.mark.fast("dpo-padded", "dpo-by tokens", "reward_model-checkpointing")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_parameter(inputs, straight, tmp_path, layout):
    train(straight.kind, overrides(inputs, tmp_path, *LAYOUTS[layout]))
    require_equal_weights(tmp_path, final_weights(straight.run))


@pytest.mark.fast("dpo")
def test_resume_is_exact(inputs, straight, tmp_path):
    train(straight.kind, overrides(inputs, tmp_path, "trainer.save_freq=2"))
    (tmp_path / "global_step_4").rename(tmp_path / "lost")  # as if it had died after the checkpoint before
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    resumed = train(straight.kind, overrides(inputs, tmp_path, "trainer.save_freq=2"))
    assert resumed.group.weights_hash() == straight.trainer.group.weights_hash()
    assert metrics(tmp_path) == metrics(straight.run)


# ----------------------------------------------------------------------------------------------- strop sft


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


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_answers_end_as_turns_of_the_chat_template_that_end_a_response(file, inputs, tmp_path, caplog):
    """The template writes <end>; the tokenizer ends texts with <pad>, as Gemma's ends turns with another."""
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").unlink()

    def ends(ids, *options):
        written = json.loads((inputs / "model" / file).read_text())
        (model / file).write_text(json.dumps({**written, "eos_token_id": ids}))
        found = []
        for kind, names in (("sft", ["response"]), ("dpo", ["chosen", "rejected"])):
            tree, trainer = KINDS[kind]
            rows = build(
                trainer, load_tree(tree, overrides(inputs, tmp_path, f"model.path={model}", *options))
            ).train_loader.dataset
            found += [row[name][-2:].tolist() for row in rows for name in names]
        assert all(before > 3 for before, _ in found)  # a character
        return {end for _, end in found}

    with caplog.at_level("INFO"):
        assert ends([0, 1]) == {1}
    assert "<end>" in caplog.text
    assert ends(0) == {0}  # a response would not end with the template's


@pytest.mark.parametrize("text", ["12<|im_end|>", "12<|im_end|>\n", "12<|end|>", "12"])
def test_answers_that_were_rendered_beforehand_get_no_second_end(text):
    tokenizer = byte_tokenizer()
    options = {
        "prompt_key": "prompt",
        "answer_keys": {"response": "response"},
        "max_prompt_length": 60,
        "max_response_length": 60,
        "end_ids": [tokenizer.convert_tokens_to_ids("<|end|>")],
    }
    rows = Rows("rows", [{"prompt": "<|im_start|>user\n1", "response": text}])
    how = PromptFormat(apply_chat_template=False, allow_special_tokens=True)
    found = AnsweredDataset(rows, tokenizer, how=how, **options)
    ended = text.strip() if "end" in text else "12<|im_end|>"
    assert tokenizer.decode(found[0]["response"]) == ended
    as_text = AnsweredDataset(rows, tokenizer, **options)
    assert tokenizer.decode(as_text[0]["response"]) == f"{text}<|im_end|>"


@pytest.mark.parametrize("allow_special_tokens", [False, True])
def test_answers_of_a_tokenizer_without_an_end_token_are_refused(allow_special_tokens):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    how = PromptFormat(apply_chat_template=False, allow_special_tokens=allow_special_tokens)
    rows = Rows("rows", [{"prompt": "1", "response": "12"}])
    options = {"prompt_key": "prompt", "answer_keys": {"response": "response"}, "how": how}
    with pytest.raises(ModelError, match="has no end token for responses"):
        AnsweredDataset(rows, tokenizer, max_prompt_length=60, max_response_length=60, **options)


def test_batches_have_the_layout_of_rollouts():
    rows = [
        {"input_ids": torch.tensor([5, 6]), "response": torch.tensor([7, 8, 1]), "data_source": "a"},
        {"input_ids": torch.tensor([5]), "response": torch.tensor([1]), "data_source": "b"},
    ]
    batch = response_batch(rows, pad_token_id=0, max_prompt_length=3, max_response_length=4).batch
    assert batch["input_ids"].tolist() == [[0, 5, 6, 7, 8, 1, 0], [0, 0, 5, 1, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_validation_weighs_every_token_alike(sft):
    model = AutoModelForCausalLM.from_pretrained(sft.run / "final_model")
    dataset = sft.trainer.val_loader.dataset
    with torch.no_grad():
        loss = response_loss(model, [dataset[number] for number in range(len(dataset))]).item()
    last = metrics(sft.run)[-1]
    assert last["val/loss"] == pytest.approx(loss, abs=1e-5)
    assert last["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_validation_alone_takes_a_model_or_a_checkpoint_and_no_training_files(inputs, sft, tmp_path):
    only = ("trainer.val_only=True", "data.train_files=/no.parquet")
    trained = f"model.path={sft.run / 'final_model'}"
    train("sft", overrides(inputs, tmp_path / "model", *only, trained))
    (line,) = metrics(tmp_path / "model")
    last = metrics(sft.run)[-1]
    assert line == {"step": 0, **{name: pytest.approx(last[name]) for name in ("val/loss", "val/perplexity")}}
    train("sft", overrides(inputs, tmp_path / "run", "trainer.save_freq=2"))
    resumed = train("sft", overrides(inputs, tmp_path / "run", *only))
    assert resumed.global_step == 4
    assert resumed.group.weights_hash() == sft.trainer.group.weights_hash()


def test_a_final_model_is_the_newest_until_the_run_goes_on_from_before_it(inputs, tmp_path):
    def model_after(*settings):
        train("sft", overrides(inputs, tmp_path, "data.val_files=[]", *settings))
        return strop.Run(tmp_path).model_path.relative_to(tmp_path)

    final, weights = Path("final_model"), "model.safetensors"
    assert model_after("trainer.total_training_steps=2", "trainer.save_freq=1") == final
    saved = tmp_path / "global_step_2" / "actor" / "huggingface"
    assert (tmp_path / final / weights).samefile(saved / weights)
    assert not (tmp_path / final / "config.json").samefile(saved / "config.json")  # people edit it
    assert model_after("trainer.total_training_steps=4", "trainer.save_minutes=null") == final
    assert model_after("trainer.total_training_steps=3", "trainer.save_freq=1") == final
    assert iteration_of(tmp_path / final) == 3
    assert iteration_of(tmp_path / "previous_1" / "final_model") == 4


def test_validation_alone_requires_validation_files(inputs, tmp_path):
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
    assert len(AnsweredDataset(file, tokenizer, filter_overlong=True, **options)) == 2
    assert "dropped 2 of 4 rows" in caplog.text
    parts = ("long.parquet", "row 1", "field prompt", "22 tokens", "2 of 4", "data.filter_overlong=True")
    whole = "data.max_prompt_length=22 data.max_response_length=9"  # the longest, with its end token
    with pytest.raises(DataError, match=naming(*parts, whole)):
        AnsweredDataset(file, tokenizer, **options)
    cut = AnsweredDataset(file, tokenizer, truncation="left", **options)
    assert tokenizer.decode(cut[1]["input_ids"]) == "1" * 9 + "<assistant>"
    assert tokenizer.decode(cut[2]["response"]) == "123456"  # and no end: it is not where the answer ends


def test_answers_that_were_cut_get_no_end_token(tokenizer, tmp_path, caplog):
    draw = random.Random(0)
    cut = [(True, False), (False, None), (True, True)]
    rows = [
        {
            **row(draw, index),
            "chosen": "123456",
            "rejected": "7",
            "chosen_truncated": c,
            "rejected_truncated": r,
        }
        for index, (c, r) in enumerate(cut)
    ]
    options = {
        "prompt_key": "prompt",
        "answer_keys": {"chosen": "chosen", "rejected": "rejected"},
        "max_prompt_length": 10,
        "max_response_length": 6,
        "filter_overlong": True,
    }
    with caplog.at_level("INFO"):
        found = AnsweredDataset(write_rows(tmp_path / "cut.parquet", rows), tokenizer, **options)
    assert "chosen_truncated: 2 of 3" in caplog.text
    assert "rejected_truncated: 1 of 3" in caplog.text
    # row 1 has six tokens and an end, one too many; the others end at the limit
    end = tokenizer.eos_token_id
    assert [len(pair["chosen"]) for pair in found] == [6, 6]
    assert [pair["chosen"][-1].item() == end for pair in found] == [False, False]
    assert [pair["rejected"].tolist()[1:] for pair in found] == [[end], []]
    unknown = [{**pair, "chosen_truncated": None, "chosen": "12"} for pair in rows]
    found = AnsweredDataset(write_rows(tmp_path / "unknown.parquet", unknown), tokenizer, **options)
    assert all(pair["chosen"][-1].item() == end for pair in found)
    words = [{**pair, "chosen_truncated": "yes"} for pair in rows]
    with pytest.raises(
        DataError, match=naming("words.parquet", "'chosen_truncated'", "True or False", "string")
    ):
        AnsweredDataset(write_rows(tmp_path / "words.parquet", words), tokenizer, **options)


def test_a_single_answer_may_be_marked_as_in_samples_of_strop(tokenizer):
    options = {"prompt_key": "prompt", "max_prompt_length": 10, "max_response_length": 6}
    rows = [
        {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "truncated": cut}
        for cut in (True, False, None)
    ]
    end = tokenizer.eos_token_id
    found = AnsweredDataset(Rows("samples", rows), tokenizer, answer_keys={"response": "response"}, **options)
    assert [one["response"].tolist()[1:] for one in found] == [[], [end], [end]]
    both = {"chosen": "chosen", "rejected": "rejected"}  # which of them was cut?
    pairs = AnsweredDataset(Rows("pairs", rows), tokenizer, answer_keys=both, **options)
    assert all(one[name].tolist()[1:] == [end] for one in pairs for name in both)


def as_csv(path, rows):
    path.write_text("prompt,response\n" + "".join(f"{one['prompt']},{one['response']}\n" for one in rows))


def as_lines(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def as_chats(path, rows):
    as_lines(path, [{**one, "response": [{"role": "assistant", "content": one["response"]}]} for one in rows])


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.csv", as_csv), ("a.jsonl", as_lines), ("b.jsonl", as_chats), ("a.parquet", write_rows)],
)
def test_rows_with_an_empty_answer_are_dropped_and_counted(name, write, tokenizer, tmp_path, caplog):
    rows = [{"prompt": f"{n}+1=", "response": text} for n, text in enumerate(("1", "", "3", " "))]
    options = {
        "prompt_key": "prompt",
        "answer_keys": {"response": "response"},
        "max_prompt_length": 10,
        "max_response_length": 6,
    }
    write(tmp_path / name, rows)
    found = AnsweredDataset(tmp_path / name, tokenizer, **options)
    assert [tokenizer.decode(one["response"][:-1]) for one in found] == ["1", "3"]
    assert mentions(caplog.text, f"{name}: dropped 2 of 4", "row 1, field response")
    write(tmp_path / name, rows[1:2])
    with pytest.raises(DataError, match=naming(f"{name}, row 0, field response", "empty")):
        AnsweredDataset(tmp_path / name, tokenizer, **options)


def test_pairs_with_an_empty_answer_are_dropped_and_counted(tokenizer, caplog):
    """As in the published Helpful and Harmless dialogues; strop prepare drops them, too."""
    rows = [{"prompt": "1+1=", "chosen": c, "rejected": r} for c, r in (("", "3"), ("2", "3"), ("2", ""))]
    options = {"prompt_key": "prompt", "max_prompt_length": 10, "max_response_length": 6}
    both = {"chosen": "chosen", "rejected": "rejected"}
    (pair,) = AnsweredDataset(
        [Rows("a", rows[1:]), Rows("b", rows[:1])], tokenizer, answer_keys=both, **options
    )
    assert tokenizer.decode(pair["rejected"][:-1]) == "3"
    assert mentions(caplog.text, "dropped 2 of 3", "rows:a, row 1, field rejected")


def test_answers_that_are_the_same_are_counted_and_refused_in_every_row(tokenizer, tmp_path, caplog):
    draw = random.Random(0)
    rows = [{**row(draw, index), "chosen": "1", "rejected": "1" if index < 3 else "2"} for index in range(4)]
    options = {
        "prompt_key": "prompt",
        "answer_keys": {"chosen": "chosen", "rejected": "rejected"},
        "max_prompt_length": 10,
        "max_response_length": 6,
    }
    assert len(AnsweredDataset(write_rows(tmp_path / "some.parquet", rows), tokenizer, **options)) == 4
    assert "the same in 3 of 4 rows" in caplog.text
    with pytest.raises(
        DataError, match=naming("all.parquet", "data.chosen_key", "data.rejected_key", "every")
    ):
        AnsweredDataset(write_rows(tmp_path / "all.parquet", rows[:3]), tokenizer, **options)


def test_a_missing_column_is_named_with_its_key(inputs, tmp_path):
    options = overrides(inputs, tmp_path, "data.response_key=answer")
    with pytest.raises(DataError, match=naming("column 'answer'", "data.response_key")):
        build(SftTrainer, load_tree(SFT, options))

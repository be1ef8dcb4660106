"""The reward model's worker against transformers: tokenizers, micro-batches, ranks, the critic it starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from strop.config.load import load_config
from strop.controller.pools import ResourcePoolManager, Role
from strop.errors import StropError
from strop.models.loader import load_scorer, load_tokenizer
from strop.protocol import DataProto
from strop.trainer.build import build_trainer, check_models
from strop.workers.critic import CriticWorker
from strop.workers.reward_model import RewardModelWorker

import tiny_model
from builders import random_samples
from messages import mentions, naming
from runs import make_inputs, overrides

OWN_CHARACTERS = "=+0123456789 QA."
OWN_TEMPLATE = (
    "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}.{% endfor %}"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A policy with prompts; ``shared``, a reward model of its tokens; ``own``, one with others."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    load_scorer(folder / "model", fresh_head_seed=5).save_pretrained(folder / "shared")
    tiny_model.build_tokenizer().save_pretrained(folder / "shared")
    _save_reward_model(folder / "own", characters=OWN_CHARACTERS, template=OWN_TEMPLATE)
    return folder


def _save_reward_model(folder, *, characters, template=tiny_model.CHAT_TEMPLATE, rows=None):
    tokenizer = tiny_model.build_tokenizer(characters)
    tokenizer.chat_template = template
    body = folder.with_name(f"{folder.name}-body")
    model = tiny_model.build_model(tokenizer, hidden=32, seed=3)
    if rows:
        model.resize_token_embeddings(rows)
    model.save_pretrained(body)
    load_scorer(body, fresh_head_seed=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(inputs, model, *extra):
    tokenizer = inputs / "model" if model == "own" else "null"
    options = (
        "reward_model.enable=true",
        f"reward_model.model.path={inputs / model}",
        f"reward_model.model.input_tokenizer={tokenizer}",
        f"critic.model.path={inputs / model}",
        *extra,
    )
    return load_config(overrides(inputs, inputs / "run", *options))


def _worker(inputs, model, *extra):
    worker = RewardModelWorker(_config(inputs, model, *extra), Role.RewardModel)
    worker.init_model()
    return worker


PROMPTS = ["1+2=", "12+30=", "7", "4+4="]
RESPONSES = ["3", "421", "1234", ""]
TRUNCATED = [False, False, True, False]


@pytest.fixture(scope="module")
def samples():
    """Two of each prompt, as a rollout of the policy returns them."""
    tokenizer = tiny_model.build_tokenizer()
    rows = [row for row in zip(PROMPTS, RESPONSES, TRUNCATED, strict=True) for _ in range(2)]
    prompts = [[{"role": "user", "content": prompt}] for prompt, *_ in rows]
    prompt_ids = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for prompt in prompts
    ]
    ids, mask = torch.zeros(8, 14, dtype=torch.long), torch.zeros(8, 14, dtype=torch.long)
    for row, (start, (_, response, truncated)) in enumerate(zip(prompt_ids, rows, strict=True)):
        ends = tokenizer.encode(response) + [tokenizer.eos_token_id] * (not truncated)
        ids[row, 8 - len(start) : 8 + len(ends)] = torch.tensor([*start, *ends])
        mask[row, 8 - len(start) : 8 + len(ends)] = 1
    raw_prompt = np.empty(8, dtype=object)
    raw_prompt[:] = prompts
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "prompts": ids[:, :8],
        "responses": ids[:, 8:],
        "response_mask": mask[:, 8:].float(),
        "truncated": torch.tensor([truncated for *_, truncated in rows]),
    }
    return DataProto(columns, {"raw_prompt": raw_prompt})


def _scores_of_texts(folder, texts):
    """Scores by transformers' own class, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    ids = [torch.tensor([tokenizer.encode(text, add_special_tokens=False)]) for text in texts]
    with torch.no_grad():
        return torch.stack([model(input_ids=row).logits[0, 0] for row in ids])


def _scores(worker, batch):
    return worker.compute_rm_score(batch).batch["rm_scores"]


def _close(found, expected):
    assert expected.std() > 0.01  # scores that are all the same would show nothing
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


TEXTS = {
    "shared": [
        "<user>1+2=<assistant>3<end>",
        "<user>12+30=<assistant>421<end>",
        "<user>7<assistant>1234",
        "<user>4+4=<assistant><end>",
    ],
    "own": ["Q1+2=.A3<end>.", "Q12+30=.A421<end>.", "Q7.A1234", "Q4+4=.A<end>."],
}
CUT_TO_7 = ["2=.A3<end>.", ".A421<end>.", "7.A1234", "+4=.A<end>."]
BY_TOKENS = ("reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=20")
CAP_OF_THE_POLICY = ("reward_model.forward_max_token_len_per_gpu=13",)  # a longer text makes its pass larger
THREE = ("reward_model.micro_batch_size_per_gpu=3",)
PADDED = ("actor_rollout_ref.model.use_remove_padding=false",)
PACKED = ("actor_rollout_ref.model.use_remove_padding=true",)


@pytest.mark.parametrize(
    ("model", "texts", "options", "passes"),
    [
        ("shared", TEXTS["shared"], ("reward_model.micro_batch_size_per_gpu=8", *PADDED), 1),
        ("shared", TEXTS["shared"], THREE, 3),
        ("shared", TEXTS["shared"], (*BY_TOKENS, *PACKED), None),
        ("own", TEXTS["own"], ("reward_model.micro_batch_size_per_gpu=1",), 8),
        ("own", TEXTS["own"], (*BY_TOKENS, *PADDED), None),
        ("own", TEXTS["own"], (*CAP_OF_THE_POLICY, *PADDED), None),
        ("own", TEXTS["own"], (*THREE, *PACKED), 3),
        ("own", CUT_TO_7, ("reward_model.max_length=7",), 1),
    ],
)
def test_scores_are_those_of_transformers_in_any_micro_batches(
    inputs, samples, model, texts, options, passes
):
    """The policy's tokens, or the conversation in the reward model's own tokens and template."""
    expected = _scores_of_texts(inputs / model, texts).repeat_interleave(2)
    worker = _worker(inputs, model, *options)
    counted = []
    worker.engine.module.register_forward_hook(lambda *_: counted.append(1))
    _close(_scores(worker, samples), expected)
    assert len(counted) == passes if passes else len(counted) > 1


def test_a_critic_that_starts_from_it_gives_every_state_the_score_of_the_text_so_far(inputs, samples):
    critic = CriticWorker(_config(inputs, "shared"), Role.Critic)
    critic.init_model()
    values = critic.compute_values(samples).batch["values"]
    start = AutoModelForSequenceClassification.from_pretrained(inputs / "shared")
    weights = dict(start.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in critic.engine.named_weights())
    columns, worker = samples.batch, _worker(inputs, "shared")
    compared = 0
    for t in range(columns["response_mask"].shape[1]):
        mask = columns["attention_mask"].clone()
        mask[:, 8 + t :] = 0
        until = DataProto({**columns, "attention_mask": mask}).select(
            "input_ids", "attention_mask", "position_ids", "response_mask"
        )
        reached = columns["response_mask"][:, t].bool()
        torch.testing.assert_close(values[reached, t], _scores(worker, until)[reached], atol=1e-6, rtol=0)
        compared += int(reached.sum())
    assert compared == int(columns["response_mask"].sum()) == 2 * (2 + 4 + 4 + 1)


@pytest.mark.slow
def test_sharded_beside_the_critic_and_in_a_separate_pool_it_scores_as_in_one_process(
    ray_session, inputs, samples
):
    from strop.controller.ray.group import RayWorkerGroup

    pools = {"both": [2], "apart": [1]}
    manager = ResourcePoolManager(pools, {Role.Critic: "both", Role.RewardModel: "apart"})
    batch = samples[torch.arange(7)]  # not as many on each rank
    calls, groups = {}, {}
    for name, pool, role, model, worker_cls, method in (
        ("critic", "both", Role.Critic, "shared", CriticWorker, "compute_values"),
        ("beside it", "both", Role.RewardModel, "own", RewardModelWorker, "compute_rm_score"),
        ("apart", "apart", Role.RewardModel, "own", RewardModelWorker, "compute_rm_score"),
    ):
        config = _config(inputs, model, "reward_model.micro_batch_size_per_gpu=2")
        groups[name] = RayWorkerGroup(
            worker_cls=worker_cls,
            init_kwargs={"config": config, "role": role},
            resource_pool=manager.pools[pool],
            name=name,
            settings=config.trainer,
        )
        groups[name].init_model()
        calls[name] = getattr(groups[name], method)
    started = {name: call.start(batch) for name, call in calls.items()}
    found = {name: call.get().batch for name, call in started.items()}
    critic = CriticWorker(_config(inputs, "shared"), Role.Critic)
    critic.init_model()
    _close(found["critic"]["values"] + 0, critic.compute_values(batch).batch["values"])
    expected = _scores(_worker(inputs, "own"), batch)
    for name in ("beside it", "apart"):
        _close(found[name]["rm_scores"] + 0, expected)
    for group in groups.values():
        group.shutdown()


def test_another_vocabulary_is_refused_and_rows_to_spare_of_a_critic_are_not(inputs, tmp_path):
    other = tmp_path / "other"
    options = overrides(inputs, tmp_path, f"critic.model.path={other}", f"reward_model.model.path={other}")
    of_critic = load_config(options)
    config = load_config(
        [*options, "reward_model.enable=true", "reward_model.model.input_tokenizer=null"],
    )

    def check(characters, rows=None, config=config):
        _save_reward_model(other, characters=characters, rows=rows)
        check_models(config, load_tokenizer(inputs / "model"))

    def refusal(characters, rows=None):
        with pytest.raises(
            StropError, match=naming("reward_model.model.input_tokenizer", "critic.model")
        ) as e:
            check(characters, rows)
        return str(e.value)

    digits = tiny_model.CHARACTERS
    assert mentions(refusal(digits, rows=18), "19 tokens", "18 tokens")
    swapped = f"1{digits[0]}{digits[2:]}"
    assert mentions(refusal(swapped), "19 tokens", "2 ids", "4", "'0'", "'1'")
    assert mentions(refusal(f"X{digits}"), "20 tokens", "the first, 4", "'0'", "'X'")
    for characters, rows in ((digits, 64), (f"{digits}X", None)):
        check(characters, rows, of_critic)
        with pytest.raises(StropError, match=naming("19 tokens", str(rows or 20), "input_tokenizer=null")):
            check(characters, rows)
    for file in other.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StropError, match=naming("19 tokens", "20 tokens", "no tokenizer", "critic.model")):
        check_models(config, load_tokenizer(inputs / "model"))


def test_a_padding_token_without_a_row_in_the_embeddings_is_refused(inputs, tmp_path):
    config = load_config(overrides(inputs, tmp_path))
    tokenizer = load_tokenizer(inputs / "model")
    check_models(config, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(StropError, match=naming("19 tokens", "19", "[PAD]", "actor_rollout_ref.model.path")):
        check_models(config, tokenizer)


def test_a_shared_tokenizer_that_ends_conversations_differently_is_a_warning(inputs, tmp_path, caplog):
    """Template like ChatML's, with a line end after the end token."""

    def warnings(template, *extra):
        for name in ("policy", "reward_model"):
            _save_reward_model(tmp_path / name, characters=tiny_model.CHARACTERS, template=template)
        policy = tmp_path / "policy"
        options = [
            f"actor_rollout_ref.model.path={policy}",
            f"reward_model.model.path={tmp_path / 'reward_model'}",
            "reward_model.enable=true",
            *extra,
        ]
        caplog.clear()
        build_trainer(load_config(overrides(inputs, tmp_path, *options)))
        return [record.getMessage() for record in caplog.records if "train-rm" in record.getMessage()]

    spaced = tiny_model.CHAT_TEMPLATE.replace("<end>", "<end> ")
    assert warnings(tiny_model.CHAT_TEMPLATE) == []
    (line,) = warnings(spaced)
    assert "set the key to null" in line
    assert warnings(spaced, "reward_model.model.input_tokenizer=null") == []


def test_random_samples_without_messages_are_scored_when_tokens_are_shared(inputs):
    batch = random_samples(5)
    assert len(set(_scores(_worker(inputs, "shared"), batch).tolist())) == 5

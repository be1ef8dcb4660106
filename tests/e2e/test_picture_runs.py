"""Runs on prompts with pictures."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import picture_rows
import pytest
import torch
from picture_rows import APART, answers, options, picture, turns, write_rows
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import strop
from strop.checkpoint.folder import auto_class
from strop.cli.main import main
from strop.cli.without_torch import needs_torch
from strop.config.checks.pictures import require_pictures
from strop.config.load import load_config
from strop.data.control_tokens import ControlTokens
from strop.data.loader import EpochSampler
from strop.errors import CheckpointError, ConfigError, DataError, ModelError, StropError
from strop.models.vision import PictureReader
from strop.results import Evaluation
from strop.trainer.build import build_trainer
from strop.trainer.loop import Run
from strop.trainer.ray_trainer import RayPPOTrainer

import picture_models
import runs
from killing import kill

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'strop[peft]'"
)
EXAMPLES = Path(__file__).parents[2] / "examples"
SAVED = ("trainer.save_freq=1", "trainer.total_training_steps=4", "trainer.test_freq=2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return picture_rows.inputs(tmp_path_factory.mktemp("pictures"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_ppo_trains_every_part_with_a_critic_and_a_reference(inputs, tmp_path, kind):
    runs.train(options(inputs, tmp_path, kind=kind))
    before, after = weights(inputs / kind), weights(tmp_path / "final_model")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert not same, same
    (first, _) = runs.metrics(tmp_path)
    assert first["training/rollout_probs_diff_max"] < 2e-6
    assert first["critic/vf_loss"] > 0
    started = json.loads((tmp_path / "machine.jsonl").read_text())
    assert started["image_processor"] == type(AutoImageProcessor.from_pretrained(inputs / kind)).__name__
    assert first["training/rollout_probs_diff_max/pictures"] == first["training/rollout_probs_diff_max"]
    assert "training/rollout_probs_diff_max/text" not in first


def test_frozen_parts_keep_every_bit(inputs, tmp_path):
    runs.train(options(inputs, tmp_path, "actor_rollout_ref.model.freeze=[encoder]"))
    before, after = weights(inputs / "smolvlm"), weights(tmp_path / "final_model")
    same = {name.split(".")[1] for name in before if torch.equal(before[name], after[name])}
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert (same, changed) == ({"vision_model"}, {"connector", "text_model"})


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "point"), [(0, "update"), (4, "seal")])
def test_a_killed_run_continues_to_the_same_numbers(inputs, tmp_path, steps, point):
    keys = (*(APART if steps else ()), f"trainer.async_steps={steps}")
    run = options(inputs, tmp_path / "run", *SAVED, *keys)
    kill(point, 3, run)
    expected = runs.hashes(runs.train(options(inputs, tmp_path / "undisturbed", *SAVED, *keys)))
    assert runs.hashes(runs.train(run)) == expected
    assert runs.metrics(tmp_path / "run") == runs.metrics(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_resume_with_another_picture_is_refused(inputs, tmp_path):
    rows = write_rows(tmp_path / "own.jsonl", 24, seed=500)
    run = options(inputs, tmp_path / "run", "trainer.save_freq=1", f"data.train_files={rows}")
    runs.train(run)
    (tmp_path / "own-1-0.png").write_bytes(picture(999, 84))
    with pytest.raises(StropError, match="pictures"):
        runs.train([*run, "trainer.total_training_steps=3"])
    for key in ("data.min_pixels", "data.max_pixels", "data.max_images"):  # samples in flight have the width
        with pytest.raises(StropError, match=key):
            runs.train([*run, "trainer.total_training_steps=3", f"{key}=3136"])


@pytest.mark.slow
def test_two_ranks_train_as_one_where_most_rows_have_no_picture(inputs, tmp_path):
    """Ranks whose micro-batch has no picture do not hang, and exports are equal.

    With selective checkpointing, whose trial has pictures, too.
    """
    keys = (
        *("trainer.save_freq=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"),
        "actor_rollout_ref.model.enable_gradient_checkpointing=selective",
    )
    runs.train(options(inputs, tmp_path / "one", *keys, rows="sparse"))
    two = ("trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
    runs.train(options(inputs, tmp_path / "two", *keys, *two, rows="sparse")).shutdown()
    expected, found = (weights(tmp_path / name / "final_model") for name in ("one", "two"))
    assert expected.keys() == found.keys()
    difference = sum(((found[name] - expected[name]) ** 2).sum() for name in expected)
    assert (difference / sum((weight**2).sum() for weight in expected.values())).sqrt() < 1e-5
    files = [
        sorted(path.name for path in (tmp_path / name / "final_model").iterdir()) for name in ("one", "two")
    ]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_run_over_ray_is_that_of_one_process(inputs, tmp_path):
    own = answers(tmp_path, "pictures")
    local = runs.hashes(runs.train(options(inputs, tmp_path / "local", *own)))
    apart = (
        "trainer.resource_pools={main: [1], other: [1]}",
        "trainer.placement={Critic: other}",
        "trainer.worker_group=ray",
    )
    trainer = runs.train(options(inputs, tmp_path / "ray", *own, *apart))
    assert runs.hashes(trainer) == local
    trainer.shutdown()


def test_an_exported_model_is_what_transformers_loads(inputs, tmp_path):
    run = options(inputs, tmp_path)
    trainer = runs.train(run)
    folder = tmp_path / "final_model"
    source = inputs / "smolvlm" / "processor_config.json"
    assert (folder / source.name).read_bytes() == source.read_bytes()
    loaded = AutoModelForImageTextToText.from_pretrained(folder).eval()
    module = trainer.actor.worker.engine.module
    trial = module.reader.trial_rows()
    read = PictureReader(loaded, AutoImageProcessor.from_pretrained(folder)).inputs(trial).arguments()
    with torch.no_grad():
        own = module.hugging_face_model.eval()(**module.reader.inputs(trial).arguments())
        assert torch.equal(loaded(**read).logits, own.logits)


def test_a_model_with_pictures_trains_on_text(inputs, tmp_path):
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(24)))
    runs.train(options(inputs, tmp_path / "run", f"data.train_files={rows}", f"data.val_files={rows}"))
    before, after = weights(inputs / "smolvlm"), weights(tmp_path / "run" / "final_model")
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"text_model"}


def test_a_validation_with_pictures_leaves_the_encoder_of_a_run_on_text_alone(inputs, tmp_path):
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(24)))
    keys = (
        f"data.train_files={rows}",
        "trainer.test_freq=1",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
    )
    runs.train(options(inputs, tmp_path / "run", *keys))
    before, after = weights(inputs / "smolvlm"), weights(tmp_path / "run" / "final_model")
    assert {n.split(".")[1] for n in before if not torch.equal(before[n], after[n])} == {"text_model"}


class Wrapped:
    """A user's data set around strop's."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int):
        return self.dataset[row]


def test_a_users_data_set_around_one_with_pictures_trains_as_that_one(inputs, tmp_path):
    run = options(inputs, tmp_path / "run", "data.val_files=[]")
    expected = runs.hashes(runs.train(run))
    trainer = build_trainer(load_config([*run, f"trainer.default_local_dir={tmp_path / 'wrapped'}"]))
    given = {
        name: getattr(trainer, name) for name in ("config", "tokenizer", "role_worker_mapping", "reward_fn")
    }
    given |= {"resource_pool_manager": trainer.resource_pool_manager, "rows": trainer.rows}
    wrapped = RayPPOTrainer(
        **given,
        ray_worker_group_cls=trainer.worker_group_cls,
        train_dataset=Wrapped(trainer.train_loader.dataset),
    )
    wrapped.init_workers()
    runs.fit(wrapped)
    assert runs.hashes(wrapped) == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["actor_rollout_ref.rollout.name=http"], "rollout.name=http generates from text alone"),
        (
            ["actor_rollout_ref.actor.strategy=megatron", "trainer.n_gpus_per_node=2"],
            "reads text alone; set its strategy to fsdp",
        ),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size=2"),
    ],
)
def test_what_takes_no_pictures_is_refused(inputs, tmp_path, keys, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        require_pictures(load_config(options(inputs, tmp_path, *keys)))


def test_a_family_that_vllm_reads_causally_is_refused_before_it_loads(inputs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    keys = [f"{role}.model.path={tmp_path}" for role in ("actor_rollout_ref", "critic")]
    keys = options(inputs, tmp_path, *keys, "actor_rollout_ref.rollout.name=vllm")
    with pytest.raises(ConfigError, match=r"causally over the pictures of gemma3.*rollout\.name=hf"):
        require_pictures(load_config(keys))
    require_pictures(load_config([*keys, "actor_rollout_ref.rollout.name=hf"]))


def test_a_rollout_whose_package_for_pictures_is_missing_is_refused_before_it_loads(
    inputs, tmp_path, monkeypatch
):
    keys = options(inputs, tmp_path, "actor_rollout_ref.rollout.name=vllm")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "torchvision" else found(name, *of)
    )
    with pytest.raises(ConfigError, match=r"name=vllm reads pictures with torchvision.*or set hf"):
        require_pictures(load_config(keys))


def test_a_process_with_another_back_end_of_image_processing_is_refused(inputs, tmp_path, monkeypatch):
    """As on a machine with torchvision beside one without: they make other pixels of a picture."""
    (tmp_path / "driver").mkdir()
    trainer = build_trainer(load_config(options(inputs, tmp_path / "driver")))
    own, other = ("Pil", "") if trainer.image_processor.endswith("Pil") else ("", "Pil")
    trainer.image_processor = trainer.image_processor.removesuffix(own) + other
    with pytest.raises(ModelError, match=rf"SmolVLMImageProcessor{own} makes .*{other} in the driver"):
        trainer.init_workers()


@pytest.mark.parametrize("mode", ["auto", "runs/a/iteration_000002"])
@pytest.mark.parametrize("before", ["SmolVLMImageProcessor", "SmolVLMImageProcessorPil"])
def test_a_resume_with_another_back_end_of_image_processing_is_an_error_in_each_mode(before, mode):
    now, remedy = {
        "SmolVLMImageProcessor": ("SmolVLMImageProcessorPil", "; install torchvision"),
        "SmolVLMImageProcessorPil": ("SmolVLMImageProcessor", "; uninstall torchvision"),
    }[before]
    state = {"global_step": 2, "loader": EpochSampler(4, 2, 0).state_dict(), "seconds": 1.0}
    state["image_processor"] = before

    def resume(image_processor, *, val_only=False):
        loader = SimpleNamespace(batches=EpochSampler(4, 2, 0))
        trainer = SimpleNamespace(image_processor=image_processor, train_loader=loader, global_step=0)
        settings = SimpleNamespace(resume_mode=mode, val_only=val_only)
        Run.load_state_dict(SimpleNamespace(trainer=trainer, settings=settings), state)
        return trainer.global_step

    assert [resume(before), resume(None), resume(now, val_only=True)] == [2, 2, 2]
    with pytest.raises(CheckpointError, match=f"{before} made.*{now}, which is used here.*{remedy}"):
        resume(now)


@pytest.fixture(scope="module")
def text_part(inputs):
    """The language model of SmolVLM, with its tokenizer."""
    whole, folder = AutoModelForImageTextToText.from_pretrained(inputs / "smolvlm"), inputs / "text"
    AutoModelForCausalLM.from_config(whole.config.text_config).save_pretrained(folder)
    for file in (inputs / "smolvlm").iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("role", ["critic", "reward_model", "teacher"])
def test_a_model_of_text_alone_is_refused_by_its_key(inputs, text_part, tmp_path, role):
    keys = [f"{role}.model.path={text_part}"]
    if role == "reward_model":
        keys += ["reward_model.enable=True", "reward_model.model.input_tokenizer=null"]
    with pytest.raises(StropError, match=rf"{role}\.model\.path=.*text alone \(llama\)"):
        build_trainer(load_config(options(inputs, tmp_path, *keys)))


@pytest.mark.slow
def test_a_reward_model_of_text_reads_words_in_the_places_of_pictures(
    inputs, text_part, tmp_path, monkeypatch
):
    config = AutoModelForCausalLM.from_pretrained(text_part).config
    config.num_labels = 1
    torch.manual_seed(3)
    scorer = AutoModelForSequenceClassification.from_config(config)
    shutil.copytree(text_part, tmp_path / "scorer")
    scorer.save_pretrained(tmp_path / "scorer")
    keys = ["reward_model.enable=True", f"reward_model.model.path={tmp_path / 'scorer'}"]
    keys += [f"reward_model.model.input_tokenizer={inputs / 'smolvlm'}"]
    with pytest.raises(ConfigError, match=r"reward_model\.sees=False"):
        build_trainer(load_config(options(inputs, tmp_path / "run", *keys)))
    texts = []
    encode = ControlTokens.encode

    def encoded(self, given, **more):
        texts.extend(given)
        return encode(self, given, **more)

    monkeypatch.setattr("strop.data.control_tokens.ControlTokens.encode", encoded)
    runs.train(options(inputs, tmp_path / "run", *keys, "reward_model.sees=False"))
    judged = [text for text in texts if "assistant" in text and "[picture]" in text]
    assert {text.count("[picture]") for text in judged} == {1, 2}
    assert not any("<image>" in text for text in judged)


def test_the_refusal_comes_before_a_model_loads(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "strop.engines.torch.engine.build_module", lambda *given, **more: pytest.fail("loads")
    )
    keys = options(inputs, tmp_path, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    with pytest.raises(ConfigError, match="the data set has pictures"):
        build_trainer(load_config(keys))  # as strop check does


def test_a_check_says_what_pictures_there_are(inputs, tmp_path, capsys):
    assert main(["check", *options(inputs, tmp_path, kind="qwen2_5_vl")]) == 0
    shown = capsys.readouterr().out
    # 28 x 28 pixels a token
    assert "36 in 24 of 24 rows, at most 2 in one; 4 (56 x 56) to 6 (84 x 56) tokens each; Qwen2_5" in shown
    assert "Qwen2VLImageProcessor" in shown
    assert "<|vision_start|>[picture 1: 56 x 56, 4 tokens]<|vision_end|>what is 0?" in shown


def test_a_check_of_given_answers_shows_their_pictures(inputs, tmp_path, capsys):
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    file = inputs / "answered.jsonl"  # beside the pictures that it names
    file.write_text("".join(json.dumps({**row, "response": "red"}) + "\n" for row in rows))
    keys = [f"model.path={inputs / 'smolvlm'}", f"data.train_files={file}", "data.train_batch_size=8"]
    keys += ["data.max_prompt_length=48", f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"]
    assert main(["check", "--command", "sft", "--images", "--full", *keys]) == 0
    shown = capsys.readouterr().out
    assert "36 in 24 of 24 rows, at most 2 in one; 4 tokens each; SmolVLM" in shown
    assert "pictures: files, processed pixels" in shown


def test_a_check_may_decode_all_pictures(inputs, tmp_path, capsys):
    rows = write_rows(tmp_path / "own.jsonl", 12, seed=300)
    for name in ("own-7-1.png", "own-10-0.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2000])
    run = options(inputs, tmp_path / "run", f"data.train_files={rows}")
    assert main(["check", *run]) == 0
    capsys.readouterr()
    assert main(["check", "--images", *run]) == 2
    shown = capsys.readouterr().out
    assert shown.count("the picture is damaged") == 2
    for row, entry, name in ((7, 1, "own-7-1.png"), (10, 0, "own-10-0.png")):
        assert f"own.jsonl, row {row}, field images, picture {entry}, {name}: the picture is damaged" in shown


@pytest.mark.parametrize(("facts", "is_hidden"), [(("torchvision",), False), ((), True)])
def test_a_check_takes_the_image_processor_of_a_run(inputs, tmp_path, monkeypatch, facts, is_hidden):
    """Without torch transformers has that of Pillow alone; with torchvision a run has another."""
    find = importlib.util.find_spec
    known = {"torchvision": find("torch") if facts else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: known.get(name, find(name, *more)))
    assert needs_torch(load_config(options(inputs, tmp_path))) != is_hidden


def test_an_evaluation_of_the_first_rows_sees_their_pictures(inputs, tmp_path):
    found = strop.evaluate(
        str(inputs / "smolvlm"),
        str(inputs / "val.jsonl"),
        f"{inputs / 'reward.py'}:score",
        out=tmp_path,
        **{"data.max_prompt_length": 48, "data.max_response_length": 4, "trainer.device": "cpu"},
        **{"data.val_max_samples": 2},
    )
    assert sum(source["samples"] for source in found.results["sources"].values()) == 2


SEEN = """
def score(response, images):
    assert all(picture.mode == "RGB" for picture in images)
    return sum(picture.width for picture in images) / 100
"""


def test_a_reward_sees_the_pictures_of_its_prompt(inputs, tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    reward = f"custom_reward_function.path={tmp_path / 'seen.py'}"
    runs.train(options(inputs, tmp_path / "run", reward, "trainer.total_training_steps=3"))
    scores = [line["critic/score/mean"] for line in runs.metrics(tmp_path / "run")]
    # 12 rows with a picture of width 56, 12 with two of width 84, in three batches of 8
    assert sum(scores) / 3 == pytest.approx((0.56 + 2 * 0.84) / 2, abs=1e-6)


@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_turns_go_on_from_a_prompt_with_pictures(inputs, tmp_path, kind):
    runs.train(options(inputs, tmp_path / "run", *turns(tmp_path), kind=kind))
    for line in runs.metrics(tmp_path / "run"):
        assert line["training/rollout_probs_diff_max"] < 2e-6
        assert line["turns/mean"] > 2
        assert line["turns/share_inserted"] > 0.3


@pytest.mark.fast("words-smolvlm")
@pytest.mark.parametrize(
    ("answer", "kind"),
    [("words", "smolvlm"), pytest.param("pictures", "qwen2_5_vl", marks=pytest.mark.slow)],
)
def test_a_program_trains_the_weights_of_the_environment_that_it_mirrors(inputs, tmp_path, kind, answer):
    found = []
    for name in (answer.capitalize(), answer):
        trainer = runs.train(options(inputs, tmp_path / name, *answers(tmp_path, name), kind=kind))
        found.append(runs.hashes(trainer))
        trainer.shutdown()
    assert runs.metrics(tmp_path / answer)[-1]["turns/mean"] > 2
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_pictures_that_come_in_turns_are_learned_from_as_they_were_sampled(inputs, tmp_path, kind, packed):
    """Without them the probabilities of the passes are off by 4e-3."""
    model = picture_models.louder(picture_models.make(kind, tmp_path / "model"))
    keys = (*answers(tmp_path, "Pictures"), f"actor_rollout_ref.model.use_remove_padding={packed}")
    runs.train(options(inputs, tmp_path / "run", *keys, f"actor_rollout_ref.model.path={model}", kind=kind))
    for line in runs.metrics(tmp_path / "run"):
        assert line["training/rollout_probs_diff_max"] < 2e-6
        assert line["turns/mean"] > 2


@pytest.mark.slow
def test_a_program_may_begin_with_other_pictures_than_its_row(inputs, tmp_path):
    model = picture_models.louder(picture_models.make("smolvlm", tmp_path / "model"))
    keys = (*answers(tmp_path, "others"), f"actor_rollout_ref.model.path={model}")
    runs.train(options(inputs, tmp_path / "run", *keys)).shutdown()
    for line in runs.metrics(tmp_path / "run"):
        assert line["training/rollout_probs_diff_max"] < 2e-6
        assert line["images/per_prompt"] == 1


@pytest.mark.fast("Words")
@pytest.mark.parametrize("name", ["Words", "words"])
def test_a_placeholder_that_was_sampled_is_no_picture_in_later_turns(inputs, tmp_path, name):
    """Two of 24 rows have pictures, and a hundredth of all sampled tokens stands for one."""
    model = picture_models.louder(picture_models.make("smolvlm", tmp_path / "model"))
    keys = (
        *answers(tmp_path, name),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=8",
    )
    trainer = runs.train(options(inputs, tmp_path / "run", *keys, rows="sparse"))
    assert all(line["training/rollout_probs_diff_max"] < 2e-6 for line in runs.metrics(tmp_path / "run"))
    trainer.shutdown()


def test_turns_bring_pictures_to_rows_of_text(inputs, tmp_path):
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(24)))
    keys = (*answers(tmp_path, "Pictures"), f"data.train_files={rows}", f"data.val_files={rows}")
    with pytest.raises(ModelError, match=r"turn 0 of sample \d+: .*set data\.max_images"):
        runs.train(options(inputs, tmp_path / "refused", *keys))
    model = picture_models.louder(picture_models.make("smolvlm", tmp_path / "model"))
    keys = (*keys, "data.max_images=1", f"actor_rollout_ref.model.path={model}")
    runs.train(options(inputs, tmp_path / "run", *keys))
    lines = runs.metrics(tmp_path / "run")
    assert all(line["training/rollout_probs_diff_max"] < 2e-6 for line in lines)
    assert all(line["images/per_prompt"] == 0 < line["images/tokens_share"] < 1 for line in lines)
    before, after = weights(model), weights(tmp_path / "run" / "final_model")
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_a_damaged_picture_of_an_environment_ends_the_run(inputs, tmp_path):
    keys = answers(tmp_path, "Damaged")
    with pytest.raises(DataError, match="the answer of respond: the picture is damaged"):
        runs.train(options(inputs, tmp_path / "run", *keys))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("Sees", 0), ("Pictures", 1), ("pictures", 4)])
def test_a_killed_run_with_turns_continues_to_the_same_numbers(inputs, tmp_path, name, steps):
    own = turns(tmp_path) if name == "Sees" else answers(tmp_path, name)
    keys = (*own, *SAVED, *(APART if steps else ()), f"trainer.async_steps={steps}")
    run = options(inputs, tmp_path / "run", *keys)
    kill("seal", 3, run)
    expected = runs.hashes(runs.train(options(inputs, tmp_path / "undisturbed", *keys)))
    assert runs.hashes(runs.train(run)) == expected
    names = ("training/", "actor/", "critic/", "turns/mean", "response")  # not the answers asked for again
    found = [
        [
            {key: line[key] for key in line if key.startswith(names)}
            for line in runs.metrics(tmp_path / folder)
        ]
        for folder in ("run", "undisturbed")
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("blank", [False, True], ids=["pictures", "blank"])
def test_the_demo_learns_colours_from_pictures_and_from_nothing_else(tmp_path, blank):
    keys = ["--out", str(tmp_path), *(["--blank"] if blank else [])]
    subprocess.run([sys.executable, str(EXAMPLES / "picture_demo.py"), *keys], check=True)
    (new,), (other,) = (Evaluation(tmp_path / f"after-{name}").scores.values() for name in ("new", "blank"))
    assert other < 0.25
    assert new < 0.25 if blank else new > 0.95


@needs_peft
def test_an_adapter_is_evaluated_with_the_processor_of_its_base_model(inputs, tmp_path, caplog):
    lora = ("actor_rollout_ref.model.lora_rank=2", "critic.model.lora_rank=0")
    with caplog.at_level("INFO"):
        trainer = runs.train(options(inputs, tmp_path / "run", *lora, "trainer.total_training_steps=1"))
    trained = sum(weight.numel() for weight in trainer.actor.worker.engine.module.trainable())
    of_actor, of_critic = (record.message for record in caplog.records if "are trained:" in record.message)
    assert of_actor == f"weights that are trained: {trained:,} of the language model"
    assert "of the encoder" in of_critic
    found = strop.evaluate(
        str(tmp_path / "run" / "final_model"),
        str(inputs / "val.jsonl"),
        f"{inputs / 'reward.py'}:score",
        out=tmp_path / "evaluation",
        **{"data.max_prompt_length": 48, "data.max_response_length": 4, "trainer.device": "cpu"},
    )
    assert sum(source["samples"] for source in found.results["sources"].values()) == 6
    assert auto_class(tmp_path / "run" / "final_model") == "AutoModelForImageTextToText"

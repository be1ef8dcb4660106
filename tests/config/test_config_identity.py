"""What a resume requires of a key: said by the schema, and what it was before the schema said it."""

from __future__ import annotations

import pytest

from strop.config.identity import decides_what_is_trained, default_name
from strop.config.keys import all_keys
from strop.config.schema import Config
from strop.config.schema.base import NOT_COMPARED
from strop.config.trees import TREES

ADAPTERS = [
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "freeze",
    "lora_adapter_path",
]
POLICY, CRITIC = "actor_rollout_ref.model", "critic.model"
MODELS = {f"{section}.{name}" for section in (POLICY, CRITIC) for name in ("path", *ADAPTERS)}
DATA = {
    f"data.{name}"
    for name in (
        *("tokenizer", "train_files", "prompt_key", "apply_chat_template", "system_prompt", "chat_template"),
        *("apply_chat_template_kwargs", "allow_special_tokens", "reward_fn_key", "data_source", "answer_key"),
        *("tools_key", "image_key", "min_pixels", "max_pixels", "max_images"),
    )
}
TURNS = {
    f"environment.{name}"
    for name in (
        *("path", "tools", "max_turns", "turn_length", "answer_length", "parser", "answer_role", "seed"),
        *("error", "malformed"),
    )
} | {f"agent.{name}" for name in ("path", "command", "parser", "lockstep", "max_calls")}
REWARDS = {
    *("custom_reward_function.path", "custom_reward_function.name", "reward_model.enable"),
    "reward_model.sees",
    *(f"reward_model.judge.{name}" for name in ("model", "rubric", "scale", "temperature")),
    *("reward_model.model.input_tokenizer", "reward_model.model.path", "reward_model.reward_manager"),
    *("reward_model.reward_kwargs", "reward_model.parts", "reward_model.non_stop_penalty"),
    *("reward_model.penalty_reward_value", "reward_model.min_response_length"),
}
TEACHER = {
    f"teacher.{name}"
    for name in ("model.path", "model.override_config", "kl", "js_weight", "top_k", "use", "by_source")
}
FILES = {
    "teacher.model.path",
    *(f"{section}.{name}" for section in (POLICY, CRITIC) for name in ("path", "lora_adapter_path")),
    *("data.tokenizer", "data.train_files", "custom_reward_function.path"),
    *("reward_model.model.path", "reward_model.model.input_tokenizer", "reward_model.judge.rubric"),
}


@pytest.mark.parametrize("command", TREES)
def test_every_key_or_its_section_says_what_a_resume_requires(command):
    keys = all_keys(TREES[command].schema).values()
    assert [key.path for key in keys if not key.is_section and key.resumes is None] == []


def test_model_data_and_reward_stay_and_only_the_model_counts_in_a_validation():
    keys = all_keys()
    assert {
        path for path, key in keys.items() if decides_what_is_trained(key)
    } == MODELS | DATA | REWARDS | TURNS | TEACHER
    validated = {path for path, key in keys.items() if decides_what_is_trained(key, validates_only=True)}
    assert validated == MODELS
    ahead = {path for path, key in keys.items() if decides_what_is_trained(key, runs_ahead=True)}
    assert ahead == MODELS | DATA | REWARDS | TURNS | TEACHER | {"agent.concurrency"}
    assert {path for path, key in keys.items() if key.names_files} == FILES
    assert {path for path, key in keys.items() if key.resumes == NOT_COMPARED} == {
        *("trainer.experiment_name", "trainer.default_local_dir", "trainer.resume_mode")
    }


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        ("sft", {"response_key"}),
        ("train-rm", {"chosen_key", "rejected_key"}),
        ("dpo", {"chosen_key", "rejected_key"}),
    ],
)
def test_supervised_runs_keep_model_and_columns(command, columns):
    found = {path for path, key in all_keys(TREES[command].schema).items() if decides_what_is_trained(key)}
    of_prompts = ("reward_fn_key", "data_source", "answer_key")
    of_rows = DATA - {f"data.{name}" for name in of_prompts}
    assert found == {
        *(TEACHER - {"teacher.use", "teacher.by_source"} if command == "sft" else ()),
        *(f"model.{name}" for name in ("path", *ADAPTERS)),
        *(f"data.{name}" for name in columns),
        *of_rows,
    }


def test_keys_that_have_their_defaults_do_not_count_in_the_name_of_the_folder():
    defaults = {"trainer.seed": 1, "data.prompt_key": "prompt", "model.path": "models/a"}
    names = {default_name("run", defaults.get, defaults.get, TREES[tree].schema) for tree in TREES}
    assert len(names) == 1
    assert names != {default_name("run", {**defaults, "data.prompt_key": "q"}.get, defaults.get, Config)}

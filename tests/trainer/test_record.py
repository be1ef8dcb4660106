"""Which changes a checkpoint is continued with."""

from __future__ import annotations

import pytest

from strop.checkpoint.record import RECORD, changed_samples, record_of, require_same_run
from strop.checkpoint.store import Checkpoints
from strop.config.load import load_config
from strop.errors import ConfigError

from messages import mentions, naming


@pytest.fixture
def options(tmp_path, monkeypatch):
    """The configuration of a run whose reward is in four files, and that has a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reward.py").write_text("import my_weights\ndef compute_score(response): return 0.0\n")
    for name in ("my_weights", "my_part", "my_manager"):
        (tmp_path / f"{name}.py").write_text("NUMBER = 1\n")
    given = [
        "actor_rollout_ref.model.path=/nowhere/model",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "+reward_model.parts.brief.scorer=my_part:brief",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    return given


def checkpoint(options):
    config = load_config(options)
    checkpoints = Checkpoints.of(config)
    checkpoints.save(1, {}, {RECORD: record_of(config), "global_step": 1})
    return checkpoints.find("auto")


def test_a_changed_file_of_the_reward_is_another_reward(options, tmp_path, caplog):
    saved = checkpoint(options)
    (tmp_path / "my_weights.py").write_text("NUMBER = 2\n")  # what it imports does not count
    require_same_run(saved, load_config(options))
    (tmp_path / "reward.py").write_text("def compute_score(response): return 1.0\n")
    key = "custom_reward_function.path"
    with pytest.raises(ConfigError, match=naming("trains something else", key)):
        require_same_run(saved, load_config(options))
    require_same_run(saved, load_config([*options, "trainer.val_only=True"]))
    caplog.set_level("INFO", logger="strop")
    require_same_run(saved, load_config([*options, f"trainer.resume_mode={saved}"]))
    assert mentions(caplog.text, "changed since", key)


@pytest.mark.parametrize(
    ("module", "key"),
    [("my_part", "reward_model.parts"), ("my_manager", "reward_model.reward_manager")],
)
def test_a_changed_module_that_a_key_of_the_reward_names_is_another_reward(options, tmp_path, module, key):
    options = [*options, "reward_model.reward_manager=my_manager:Mine"]
    saved = checkpoint(options)
    require_same_run(saved, load_config(options))
    (tmp_path / f"{module}.py").write_text("NUMBER = 2\n")
    with pytest.raises(ConfigError, match=naming("trains something else", key)):
        require_same_run(saved, load_config(options))


def test_another_weight_of_a_part_is_another_reward_although_its_file_is_the_same(options):
    saved = checkpoint(options)
    with pytest.raises(ConfigError, match=naming("trains something else", "reward_model.parts")):
        require_same_run(saved, load_config([*options, "+reward_model.parts.brief.weight=0.5"]))


def test_a_moved_reward_is_the_same_one(options, tmp_path):
    saved = checkpoint(options)
    (tmp_path / "moved").mkdir()
    (tmp_path / "reward.py").rename(tmp_path / "moved" / "reward.py")
    require_same_run(
        saved, load_config([*options, f"custom_reward_function.path={tmp_path / 'moved' / 'reward.py'}"])
    )


@pytest.mark.parametrize(
    "change",
    [
        "reward_model.max_concurrency=4",
        "reward_model.reward_manager=prime",
        "reward_model.num_workers=3",
        "reward_model.timeout_s=3",
    ],
)
def test_a_run_goes_on_with_another_parallelism_of_its_reward_in_the_same_folder(options, change):
    saved = checkpoint(options)
    require_same_run(saved, load_config([*options, change]))
    nameless = [option for option in options if "default_local_dir" not in option]
    folders = {load_config([*nameless, *more]).trainer.default_local_dir for more in ([], [change])}
    assert len(folders) == 1


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("algorithm.adv_estimator=remax", ["algorithm.adv_estimator"]),
        ("actor_rollout_ref.rollout.n=5", ["actor_rollout_ref.rollout.n"]),
        ("actor_rollout_ref.rollout.name=hf", []),
    ],
)
def test_samples_in_flight_are_generated_again_where_they_are_of_other_keys(options, change, keys):
    options = [*options, "algorithm.adv_estimator=grpo"]
    before, config = record_of(load_config(options)), load_config([*options, change])
    assert [one.key for one in changed_samples(before, record_of(config), config)] == keys


def saved_by_0_1_0(options):
    config = load_config(options)
    record = record_of(config) | {"modules": {"custom_reward_function.path": {"my_weights": "a digest"}}}
    del record["version"]
    checkpoints = Checkpoints.of(config)
    checkpoints.save(1, {}, {RECORD: record, "global_step": 1})
    return checkpoints.find("auto")


def test_a_record_of_an_earlier_version_is_continued_with_a_warning_of_other_defaults(options, caplog):
    require_same_run(saved_by_0_1_0(options), load_config(options))
    assert mentions(caplog.text, "0.1.0", "strop docs upgrading")
    caplog.clear()
    require_same_run(checkpoint(options), load_config(options))
    assert "upgrading" not in caplog.text


def test_functions_of_a_program_have_other_digests_than_in_version_0_1_0(options, caplog):
    def given(digest, name="reward", part="other"):
        path = f"custom_reward_function.path=function:{name}-{digest}"
        return [*options, path, f"+reward_model.parts.own.scorer=function:{part}-{digest}"]

    saved = saved_by_0_1_0(given("0123abcd"))
    caplog.set_level("INFO", logger="strop")
    require_same_run(saved, load_config(given("89ef4567")))
    assert mentions(caplog.text, "changed since", "custom_reward_function.path", "0123abcd", "89ef4567")
    with pytest.raises(ConfigError, match=naming("trains something else", "reward_model.parts")):
        require_same_run(saved, load_config([*given("89ef4567"), "+reward_model.parts.own.weight=0.5"]))
    with pytest.raises(ConfigError, match=naming("trains something else", "custom_reward_function.path")):
        require_same_run(saved, load_config(given("89ef4567", name="another")))
    now = checkpoint(given("0123abcd"))
    with pytest.raises(ConfigError, match=naming("trains something else", "custom_reward_function.path")):
        require_same_run(now, load_config(given("89ef4567")))

"""trainer.push_to_hub and strop export --push, against a local hub."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest
import yaml
from hub import COMMIT, UploadHub, serving
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig

from strop.checkpoint.model_card import model_card
from strop.cli.main import main
from strop.config.checks.check import check
from strop.config.load import load_tree, to_yaml
from strop.config.trees import SFT
from strop.models.loader import load_scorer

from messages import mentions
from supervised_runs import make_inputs, overrides, undrawn


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("published"))


@pytest.fixture
def hub(monkeypatch):
    with serving(UploadHub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def run(kind, inputs, folder, *extra):
    """Run the command; return its exit status."""
    short = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.push_to_hub=True")
    with undrawn():
        return main([kind, *overrides(inputs, folder, *short, *extra)])


@pytest.mark.parametrize(
    ("kind", "save"),
    [
        ("sft", ["trainer.save_freq=-1"]),
        ("train-rm", ["trainer.save_freq=1"]),
        ("dpo", ["trainer.save_freq=2", "trainer.async_save=True"]),
    ],
)
def test_the_model_goes_up_in_one_commit_with_its_card(inputs, tmp_path, hub, kind, save):
    folder = tmp_path / "first run"
    named = ["trainer.hub_repo_id=first", "trainer.experiment_name=first run"]
    assert run(kind, inputs, folder, *save, *named) == 0

    ((repository, branch, message, files),) = hub.commits
    assert (repository, message) == ("ada/first", "Upload the model of iteration 2")
    assert re.fullmatch(r"first-run__1__\d{10}", branch)
    assert hub.repositories["ada/first"]["visibility"] == "private"
    role = "reward_model" if kind == "train-rm" else "actor"
    model = folder / ("final_model" if kind == "sft" else f"global_step_2/{role}/huggingface")
    if kind != "dpo":  # a background save holds shards
        assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert files["config.json"] == (model / "config.json").read_bytes()
    assert {"model.safetensors", "tokenizer.json"} <= files.keys()
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert {"strop", kind} <= set(card.data.tags)
    assert f'from_pretrained("ada/first", revision="{branch}")' in card.text
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert "| Loss: training (per token or pair) | `train/loss` |" in card.text
    assert f"{last['train/loss']:.3f} (step 2)" in card.text
    assert "update.optim.lr: 0.01" in card.text
    recorded = json.loads((folder / "hub.json").read_text())
    assert recorded["commit"] == COMMIT
    assert recorded["url"] == f"{hub.url}/ada/first/tree/{branch}"


def test_nothing_is_loaded_where_the_hub_refuses(inputs, tmp_path, hub, capsys, monkeypatch):
    monkeypatch.setattr("strop.workers.supervised.SupervisedWorker.load", None)
    hub.refuse["/api/repos/create"] = 403
    assert run("sft", inputs, tmp_path / "run", "trainer.hub_repo_id=them/first") == 2
    assert mentions(capsys.readouterr().err, "trainer.hub_repo_id=them/first", "hf auth whoami", "--push")
    hub.refuse = {"/branch/": 403}
    assert run("sft", inputs, tmp_path / "run", "trainer.hub_repo_id=them/first") == 2


def test_a_failed_upload_is_a_warning_with_the_command_that_repeats_it(inputs, tmp_path, hub, caplog, capsys):
    folder = tmp_path / "run"
    hub.refuse["/commit/"] = 500
    hub.refuse["/preupload/"] = 403
    assert run("sft", inputs, folder, "trainer.hub_repo_id=ada/first", "trainer.hub_revision=v1") == 3
    (warning,) = [record.message for record in caplog.records if "could not be uploaded" in record.message]
    command = warning.splitlines()[-1].split()
    assert command[:2] == ["strop", "export"]
    assert command[3:] == ["--push", "ada/first", "--revision", "v1"]
    assert (folder / "final_model" / "model.safetensors").is_file()
    assert json.loads((folder / "hub.json").read_text())["commit"] is None

    hub.refuse = {}
    capsys.readouterr()
    assert main(command[1:]) == 0
    ((repository, branch, _, files),) = hub.commits
    assert (repository, branch) == ("ada/first", "v1")
    assert b"## Metrics" in files["README.md"]
    assert json.loads((folder / "hub.json").read_text())["commit"] == COMMIT
    assert f"published: {hub.url}/ada/first/tree/v1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resume_publishes_to_the_same_branch_and_a_finished_run_once(inputs, tmp_path, hub, monkeypatch):
    folder = tmp_path / "run"
    saved = ["trainer.save_freq=1", "trainer.hub_repo_id=first"]
    run("sft", inputs, folder, *saved)
    branch = json.loads((folder / "hub.json").read_text())["revision"]
    monkeypatch.setattr("time.time", lambda: 5e9)  # a new branch would have another name
    run("sft", inputs, folder, *saved)
    assert len(hub.commits) == 1
    run("sft", inputs, folder, *saved, "trainer.total_training_steps=3")
    assert [(commit[1], commit[2][-1]) for commit in hub.commits] == [(branch, "2"), (branch, "3")]
    back = [*saved, f"trainer.resume_mode={folder / 'global_step_2'}", "trainer.total_training_steps=3"]
    run("sft", inputs, folder, *back)  # the model at the end is another one, of the same iteration
    assert [commit[2][-1] for commit in hub.commits] == ["2", "3", "3"]
    run("sft", inputs, folder, *saved, "trainer.resume_mode=disable")
    assert hub.commits[-1][1].endswith("__5000000000")


def test_the_link_is_in_the_tracker_and_the_run_in_the_card(inputs, tmp_path, hub):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    own = "light_trackers:Addressed"
    (tmp_path / "light_trackers.py").write_text(
        "class Addressed:\n"
        "    address = 'https://tracker.example/run/7'\n"
        "    def __init__(self, run): (run.run_dir / 'link').write_text(run.hf_repo_url)\n"
        "    def log(self, step, metrics): pass\n"
        "    def close(self): pass\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        named = ("trainer.hub_repo_id=first", "trainer.hub_revision=v1")
        assert run("sft", inputs, folder, f"trainer.logger=[tensorboard,'{own}']", *named) == 0
    link = f"{hub.url}/ada/first/tree/v1"
    assert (folder / "link").read_text() == link
    found = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert found.Tensors("hf_repo_url/text_summary")[0].tensor_proto.string_val == [link.encode()]
    assert b"https://tracker.example/run/7" in hub.commits[0][3]["README.md"]


def test_a_card_shows_no_secret_and_no_default(inputs, tmp_path):
    values = yaml.safe_load(to_yaml(load_tree(SFT, overrides(inputs, tmp_path))))
    values["model"]["override_config"] = {
        "api_key": "hf_secret",
        "initializer_range": 0.5,
        "judges": [
            {"url": "https://ada:hf_secret@judge.net/score", "headers": {"Authorization": "hf_secret"}},
            "s3://bucket/rows.jsonl?X-Amz-Signature=hf_secret&part=1 and Bearer hf_secret",
            "api_token=hf_secret or hf_0123456789abcdef, for data@v1 of http://plain.net/rows",
        ],
    }
    values["data"]["train_files"] = ["https://hf_secret@data.net/rows.parquet", "plain.parquet"]
    values["model"]["path"] = "https://ada:hf_secret@models.net/m"
    (tmp_path / "trackers.json").write_text(
        '{"mlflow": "http://ada:hf_secret@mlflow.net:5000/#/runs?page=1&token=hf_secret"}'
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    card = model_card(inputs / "model", "ada/first", "v1", run_folder=tmp_path, step=None)
    assert "hf_secret" not in card
    assert "hf_0123456789abcdef" not in card
    for shown in (
        "@judge.net/score",
        "@data.net/rows.parquet",
        "plain.parquet",
        "@mlflow.net:5000/#/runs?page=1&",
    ):
        assert shown in card
    assert "data@v1 of http://plain.net/rows" in card
    assert "model.override_config.initializer_range: 0.5" in card
    assert "grad_clip" not in card
    assert "data.train_batch_size: 8" in card


def test_the_code_of_a_card_loads_a_scorer_that_transformers_lacks(inputs, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    language = AutoModelForCausalLM.from_config(GraniteConfig(vocab_size=300, **sizes))
    language.save_pretrained(tmp_path / "language")
    load_scorer(tmp_path / "language", fresh_head_seed=1).save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / "scorer")
    card = model_card(tmp_path / "scorer", str(tmp_path / "scorer"), "v1", run_folder=None, step=None)
    loaded = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], loaded)
    assert "scorer_config(" in card  # in this process the class is registered since load_scorer
    assert type(loaded["model"]).__name__ == "GraniteForSequenceClassification"
    assert "scorer_config(" not in model_card(inputs / "model", "a/b", "v1", run_folder=None, step=None)


def test_check_names_what_publishing_lacks(inputs, tmp_path, hub, monkeypatch):
    def errors(*extra):
        options = overrides(inputs, tmp_path / "run", "trainer.push_to_hub=True", *extra)
        return "\n".join(check(load_tree(SFT, options)).errors)

    assert errors("trainer.hub_repo_id=ada/first") == ""
    assert mentions(errors("trainer.hub_repo_id=a/b/c"), "trainer.hub_repo_id=a/b/c", "owner/name")
    assert mentions(errors("trainer.experiment_name='my run'"), "trainer.experiment_name=my run")
    assert mentions(errors("trainer.hub_revision='a b'"), "trainer.hub_revision=a b")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert mentions(errors(), "HF_TOKEN", "hf auth login")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert mentions(errors(), "HF_HUB_OFFLINE", "strop export")


@pytest.mark.parametrize("kind", ["train-rm", "dpo"])
def test_validation_pairs_are_shown_with_both_scores(inputs, tmp_path, kind, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "strop.tracking.console.PlainLines.log_validation", lambda self, step, report: shown.append(report)
    )
    extra = ["trainer.push_to_hub=False", "trainer.log_val_generations=3", "trainer.test_freq=2"]
    assert run(kind, inputs, tmp_path / "run", *extra) == 0
    (report,) = shown
    assert report.shown_name == "val/preferences"
    first, middle, last = report.shown
    rows = pq.read_table(inputs / "val.parquet").to_pylist()
    assert rows[0]["prompt"][0]["content"] in first.prompt
    assert (first.chosen[: len(rows[0]["chosen"])], last.data_source) == (rows[0]["chosen"], "odd")
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    names = ("val/rewards/chosen", "val/rewards/rejected") if kind == "dpo" else (
        "val/chosen_score", "val/rejected_score"
    )  # fmt: skip
    extra = ["trainer.resume_mode=disable", "trainer.log_val_generations=100"]
    assert (
        run(kind, inputs, tmp_path / "all", "trainer.push_to_hub=False", "trainer.test_freq=2", *extra) == 0
    )
    pairs = shown[-1].shown
    assert len(pairs) == len(rows)
    assert {first, middle} <= set(pairs)
    assert sum(pair.chosen_score for pair in pairs) / len(pairs) == pytest.approx(metrics[names[0]], abs=1e-5)
    assert sum(pair.rejected_score for pair in pairs) / len(pairs) == pytest.approx(
        metrics[names[1]], abs=1e-5
    )

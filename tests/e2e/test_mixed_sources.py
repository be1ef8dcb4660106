"""One run over four data sources, scored by rules, a sandbox, a form and a reward model: the sums agree."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from strop.config.load import load_config
from strop.models.loader import load_scorer
from strop.prepare import prepare
from strop.rollout.base import Samples, answer
from strop.trainer.build import build_trainer

import tiny_model
from outside import needs_sandbox
from runs import fit, metrics, overrides

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
SOURCES = {
    "gsm8k": ("gsm8k/test.jsonl", {}),
    "math": ("math_test/test.jsonl", {}),
    "mbpp": ("mbpp/mbpp.jsonl", {}),
    "full_hh_rlhf": ("hh_rlhf/harmless-base.test.jsonl.gz", {"split_kind": "rl"}),
}
STEPS, LONGEST = 2, 400
PARTS = (
    "{rule: {weight: {lighteval/MATH: 2, google-research-datasets/mbpp: 3, *: 1}}, "
    "reward_model: {weight: {Dahoas/full-hh-rlhf: 1, *: 0.125}}, "
    "boxed: {weight: {lighteval/MATH: 0.5}, scorer: format, kwargs: {pattern: '.*boxed.*'}}}"
)

pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not here: {DATA}"),
    needs_sandbox,
]


def right_answer(row: dict[str, Any]) -> str:
    truth = row["reward_model"]["ground_truth"]
    match row["data_source"]:
        case "openai/gsm8k":
            return f"#### {truth}"
        case "lighteval/MATH":
            return rf"\boxed{{{truth}}}"
        case "google-research-datasets/mbpp":
            return row["extra_info"]["answer"]
        case _:
            return "Yes."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three short prompts of each source in one file, their right answers, a model and a reward model."""
    folder = tmp_path_factory.mktemp("mixed")
    tables, answers = [], {}
    for name, (source, options) in SOURCES.items():
        prepared = prepare(name, str(DATA / source), folder / name, **options)
        table = pq.read_table(prepared["test"].path)
        columns = ["data_source", "prompt", "ability", "reward_model"]
        rows = []
        for row in table.to_pylist():
            text = right_answer(row)
            if len(text) < 60 and sum(len(turn["content"]) for turn in row["prompt"]) < LONGEST - 20:
                rows.append(
                    {column: row[column] for column in columns} | {"extra_info": {"index": len(answers)}}
                )
                answers[len(answers)] = text
            if len(rows) == 3:
                break
        assert len(rows) == 3
        tables.append(pa.Table.from_pylist(rows))
    pq.write_table(pa.concat_tables(tables), folder / "prompts.parquet")
    (folder / "answers.json").write_text(json.dumps(answers))
    tokenizer = tiny_model.build_tokenizer(string.printable)
    tiny_model.build_model(tokenizer, hidden=32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    load_scorer(folder / "model", fresh_head_seed=5).save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    return folder


class KnowsHalf:
    """A rollout that gives right answers and wrong ones in turn: a model this small finds none by itself."""

    def __init__(self, rollout: Any, tokenizer: Any, answers: dict[str, str]) -> None:
        self.rollout, self.tokenizer, self.answers = rollout, tokenizer, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)

    def generate(self, prompts: Any, params: Any, finished: Any = None) -> Any:
        rows = []
        for prompt, extra in enumerate(prompts.non_tensor_batch["extra_info"]):
            for number in range(params.n):
                text = self.answers[str(extra["index"])] if number % 2 == 0 else "perhaps"
                rows.append(
                    [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
                )
                finished(prompt, number, rows[-1])
        tokens = torch.zeros(len(rows), params.max_tokens, dtype=torch.long)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids in rows])
        samples = Samples(
            tokens, torch.full(tokens.shape, -4.0), lengths, torch.zeros(len(rows), dtype=torch.bool)
        )
        return answer(prompts, params, samples, pad_token_id=self.tokenizer.pad_token_id)


@pytest.mark.fast("prime")
@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_contributions_of_sources_and_parts_add_up_to_the_mean_score(
    inputs: Path, tmp_path: Path, manager: str
):
    run = tmp_path / "run"
    options = overrides(
        inputs,
        run,
        f"data.train_files={inputs / 'prompts.parquet'}",
        f"data.val_files={inputs / 'prompts.parquet'}",
        "data.train_batch_size=12",
        f"data.max_prompt_length={LONGEST}",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        "reward_model.enable=true",
        f"reward_model.model.path={inputs / 'reward_model'}",
        "reward_model.model.input_tokenizer=null",
        f"reward_model.reward_manager={manager}",
        "reward_model.timeout_s=60",
        f"reward_model.parts={PARTS}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    trainer = build_trainer(load_config(options))
    trainer.init_workers()
    worker = trainer.actor.worker
    answers = json.loads((inputs / "answers.json").read_text())
    worker.rollout = KnowsHalf(worker.rollout, trainer.tokenizer, answers)
    fit(trainer)

    lines = metrics(run)
    assert len(lines) == STEPS
    for step, line in enumerate(lines, start=1):
        added = {name: value for name, value in line.items() if name.startswith("reward/added/")}
        assert sum(added.values()) == pytest.approx(line["critic/score/mean"], abs=1e-6)
        # half of the three prompts' samples of a source, of 24 in all, are right: weight x 3 / 24
        assert line["reward/added/openai/gsm8k/rule"] == pytest.approx(3 / 24)
        assert line["reward/added/lighteval/MATH/rule"] == pytest.approx(2 * 3 / 24)
        assert line["reward/added/lighteval/MATH/boxed"] == pytest.approx(0.5 * 3 / 24)
        assert line["reward/added/google-research-datasets/mbpp/rule"] == pytest.approx(3 * 3 / 24)
        assert line["reward/error_rate"] == 0.0
        check_rows(pq.read_table(run / "rollouts" / f"step_{step:06}.parquet"), line)


def check_rows(rows: pa.Table, line: dict[str, Any]) -> None:
    """The file of samples has the parts, and its sums are those of the metrics."""
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    n, by_source = rows.num_rows, {}
    for row in range(n):
        source, model = columns["data_source"][row], columns["reward/reward_model"][row]
        rule, boxed = columns["reward/rule"][row], columns["reward/boxed"][row]
        assert (rule is None) == (source == "Dahoas/full-hh-rlhf")
        assert (boxed is None) == (source != "lighteval/MATH")
        weight = {"lighteval/MATH": 2, "google-research-datasets/mbpp": 3}.get(source, 1)
        score = weight * (rule or 0) + 0.5 * (boxed or 0)
        score += model * (1 if source == "Dahoas/full-hh-rlhf" else 0.125)
        assert columns["score"][row] == pytest.approx(score, abs=1e-5)
        by_source.setdefault(source, []).append(score)
    assert len(by_source) == 4
    for source, scores in by_source.items():
        assert line[f"reward/score/{source}/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    assert line["critic/score/mean"] == pytest.approx(sum(map(sum, by_source.values())) / n, abs=1e-5)

"""The dictionary of columns against every batch of real runs, both ways."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from strop.algorithms.preference import REFERENCE_INPUTS
from strop.columns import COLUMNS, SAMPLE_COLUMNS, Column
from strop.data.answers import pair_batch
from strop.data.loader import collate
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.models.loader import load_scorer, load_tokenizer
from strop.protocol import DataProto
from strop.tracking.samples import samples_table
from strop.workers.policy import ActorRolloutRefWorker

import picture_models
import tiny_model
from runs import make_inputs, overrides, train

OF_THE_DATA_FILE = {"ability", "tools"}  # columns that are carried along as they are
CONFIGURATIONS = {
    "gae": [
        "actor_rollout_ref.actor.rollout_is=token",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "data.return_raw_chat=True",
        "data.return_raw_input_ids=True",
    ],
    "remax": [
        "algorithm.adv_estimator=remax",
        "algorithm.kl_penalty=full",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "custom_reward_function.path={inputs}/reward.py",
    ],
    "teacher": ["teacher.model.path={inputs}/model", "teacher.kl=js"],
    "teacher of a source": [
        "teacher.by_source={strop/arithmetic: {model: {path: {inputs}/model}}}",
    ],
    "top words of a teacher": ["teacher.model.path={inputs}/model", "teacher.top_k=3"],
    "sampled by a teacher": ["teacher.model.path={inputs}/model", "teacher.kl=sampled"],
    "reward model": ["reward_model.enable=True", "reward_model.model.input_tokenizer=null"],
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> tuple[dict[str, set[tuple[int, str]]], dict[str, set[str]]]:
    """Dimensions and dtype of every column of every batch in the runs, and types in their samples files."""
    inputs = make_inputs(tmp_path_factory.mktemp("columns"))
    load_scorer(inputs / "model", fresh_head_seed=5).save_pretrained(inputs / "reward_model")
    tiny_model.build_tokenizer().save_pretrained(inputs / "reward_model")
    (inputs / "reward.py").write_text("def compute_score(response): return {'score': 1, 'said': response}")
    generate = ActorRolloutRefWorker.generate_sequences

    @functools.wraps(generate)  # keeps the mark for groups
    def numbered(worker: ActorRolloutRefWorker, prompts: DataProto, **options: Any) -> DataProto:
        prompts.meta_info["batch"] = 1
        return generate(worker, prompts, **options)

    batches: dict[str, set[tuple[int, str]]] = {}
    files: dict[str, set[str]] = {}
    original = DataProto.__post_init__

    def note(batch: DataProto) -> None:
        original(batch)
        for name, tensor in batch.batch.items():
            batches.setdefault(name, set()).add((tensor.dim(), str(tensor.dtype).removeprefix("torch.")))
        for name, column in batch.non_tensor_batch.items():
            batches.setdefault(name, set()).add((np.ndim(column), str(column.dtype)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataProto, "__post_init__", note)
        patch.setattr(ActorRolloutRefWorker, "generate_sequences", numbered)
        for number, options in enumerate(CONFIGURATIONS.values()):
            run = inputs / f"run{number}"
            model = f"reward_model.model.path={inputs / 'reward_model'}"
            options = [option.replace("{inputs}", str(inputs)) for option in options]
            train(
                overrides(
                    inputs, run, *options, model, "trainer.total_training_steps=1", "trainer.test_freq=1"
                )
            )
            for path in (*run.glob("rollouts/*.parquet"), *run.glob("validation/*.parquet")):
                for field in pq.read_schema(path):
                    files.setdefault(field.name, set()).add(_type(field.type))
        tokenizer = tiny_model.build_tokenizer()
        tokenizer.chat_template = "{{ messages[0].content }}{% if tools %}{{ tools | length }}{% endif %}"
        rows = Rows("tools", [{"prompt": "1+1=", "tools": [{"name": "f"}]}])
        dataset = RLHFDataset(rows, tokenizer, max_prompt_length=8, return_raw_chat=True)
        collate([dataset[0]], pad_token_id=0, max_prompt_length=8)
        folder = picture_models.make("smolvlm", inputs / "pictures")
        rows = Rows("pictures", [{"prompt": "?", "images": [np.zeros((56, 56, 3), np.uint8)]}])
        dataset = RLHFDataset(rows, load_tokenizer(folder), max_prompt_length=48)
        batch = collate([dataset[0]], pad_token_id=0, max_prompt_length=48)
        ids = batch.batch["input_ids"]
        answer = {"prompts": ids, "responses": ids[:, :0], "response_mask": ids[:, :0].float()}
        for field in samples_table(batch.union(DataProto(answer)), dataset.tokenizer).schema:
            files.setdefault(field.name, set()).add(_type(field.type))
        row: dict[str, Any] = {
            "data_source": "x",
            **dict.fromkeys(("input_ids", "chosen", "rejected"), torch.tensor([4, 5])),
            **dict.fromkeys(REFERENCE_INPUTS, torch.tensor(-1.5)),
        }
        pair_batch([row], pad_token_id=0, max_prompt_length=3, max_response_length=3)
    return batches, files


def _type(kind: pa.DataType) -> str:
    name = str(kind.value_type if pa.types.is_list(kind) else kind)
    return {"float": "float32"}.get(name, name) + ("*" if pa.types.is_list(kind) else "")


def described(name: str, columns: dict[str, Column]) -> Column | None:
    prefix, has_part, _ = name.partition("/")
    return columns.get(f"{prefix}/<part>" if has_part else name)


def test_every_column_of_a_batch_is_listed_with_its_shape_and_dtype(seen):
    wrong = {
        name: (column, kinds)
        for name, kinds in seen[0].items()
        if name not in OF_THE_DATA_FILE
        and ((column := described(name, COLUMNS)) is None or kinds != {(len(column.shape), column.dtype)})
    }
    assert wrong == {}


def test_every_column_of_a_samples_file_is_listed_with_its_type(seen):
    def expected(column: Column) -> str:
        return column.dtype + ("*" if column.shape.endswith("*") else "")

    wrong = {
        name: kinds
        for name, kinds in seen[1].items()
        if (column := described(name, SAMPLE_COLUMNS)) is None or kinds != {expected(column)}
    }
    assert wrong == {}


@pytest.mark.parametrize(("table", "which"), [(COLUMNS, 0), (SAMPLE_COLUMNS, 1)])
def test_every_listed_column_is_seen(seen, table, which):
    parts = {"reward/<part>", "reward_text/<part>"}
    of_turns = {
        name
        for name, column in table.items()
        if column.when.startswith(("environment", "it has", "a tree", "agent"))
    }
    assert set(table) - parts - of_turns - set(seen[which]) == set()
    assert parts <= {f"{name.partition('/')[0]}/<part>" for name in seen[which]}

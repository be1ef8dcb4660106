"""Preference losses and their gradients against TRL's, as tests/parity/trl_dpo.py recorded them."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import trl_dpo

from strop.config.load import load_tree
from strop.config.trees import DPO
from strop.data.answers import AnsweredDataset, pair_batch
from strop.engines.base import OptimizerSettings
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.models.pair_policy import PairPolicy
from strop.workers.supervised import preference_loss, preference_objective

import tiny_model

RECORD = json.loads(trl_dpo.FILE.read_text())
LAYOUTS = {
    "padded": (False, MicroBatching(rows=5)),
    "packed, of 2": (True, MicroBatching(rows=2)),
    "packed by tokens": (True, MicroBatching(max_tokens=32)),
    "padded, of 1": (False, MicroBatching(rows=1)),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {
            "prompt": row["prompt"],
            "chosen": row["chosen"][0]["content"],
            "rejected": row["rejected"][0]["content"],
        }
        for row in trl_dpo.rows()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    return AnsweredDataset(
        folder / "pairs.parquet",
        tiny_model.build_tokenizer(),
        prompt_key="prompt",
        answer_keys={"chosen": "chosen", "rejected": "rejected"},
        max_prompt_length=12,
        max_response_length=9,
        cache_dir=folder,
    )


@pytest.fixture(scope="module")
def batch(dataset):
    """The pairs with the log-probs of TRL's reference model."""
    rows = [dataset[row] for row in range(len(dataset))]
    batch = pair_batch(rows, pad_token_id=0, max_prompt_length=12, max_response_length=9)
    reference = PairPolicy(trl_dpo.model(1))
    with torch.no_grad():
        columns = {f"ref_{name}": figure for name, figure in reference(batch.batch).items()}
    batch.batch.update(columns)
    return batch


def test_tokens_are_those_of_trl(dataset):
    names = ("input_ids", "chosen", "rejected")
    assert [[dataset[row][name].tolist() for name in names] for row in range(5)] == RECORD["ids"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", trl_dpo.LOSSES)
def test_loss_and_gradients_are_those_of_trl(batch, name, layout):
    packed, micro = LAYOUTS[layout]
    settings = [f"update.{key}={value}" for key, value in trl_dpo.LOSSES[name].items()]
    update = load_tree(DPO, settings).update
    policy = trl_dpo.model(0)
    engine = TorchEngine(
        PairPolicy(policy, packed=packed),
        device=torch.device("cpu"),
        optimizer=OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8, grad_clip=1.0),
    )
    objective = preference_objective(
        preference_loss(update),
        n_pairs=5.0,
        n_tokens=float(batch.batch["response_mask"].sum()),
        nll_coef=update.nll_coef,
    )
    found = engine.forward_backward(batch, objective, micro)
    assert found["loss"] == pytest.approx(RECORD[name]["loss"], abs=1e-5)
    ours = trl_dpo.summary(trl_dpo.gradients(policy))
    assert ours.keys() == RECORD[name]["gradients"].keys()
    for parameter, expected in RECORD[name]["gradients"].items():
        # Sums of ipo's gradient reach 15: padded or packed, float32 is up to 6e-6 away from float64 there.
        bound = max(1e-5, 3e-6 * max(map(abs, expected)))
        assert ours[parameter] == pytest.approx(expected, abs=bound, rel=1e-5), parameter

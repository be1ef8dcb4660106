"""The main of the reference document, taken from the document itself, trains on Ray."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from strop import RayPPOTrainer, RayWorkerGroup, RewardManager
from strop.config.load import load_config
from strop.models.loader import load_tokenizer

from runs import hashes, make_inputs, metrics, overrides, train

DOCUMENT = (
    Path(__file__).resolve().parents[2] / ".." / "shared" / "reference" / "ppo_example_architecture.rst"
)
PARTS = ("role_worker_mapping = {", "reward_fn = RewardManager", "trainer = RayPPOTrainer(")


def _main() -> str:
    """The blocks that make up the main, with nothing changed but where names are imported from."""
    blocks = re.findall(r"\.\. code:: python\n\n((?: {3}.*\n|\s*\n)+)", DOCUMENT.read_text())
    parts = [next(block for block in blocks if part in block) for part in PARTS]
    code = "\n".join(textwrap.dedent(part) for part in parts)
    return re.sub(r"from verl\.[\w.]+ import", "from strop import", code)


@pytest.mark.parametrize("reward_model", [False, True])
def test_the_reference_documents_main_trains_on_ray_as_in_one_process(ray_session, tmp_path, reward_model):
    if not DOCUMENT.is_file():
        pytest.skip(f"the reference document is not there: {DOCUMENT}")
    inputs = make_inputs(tmp_path)
    options = []
    if reward_model:
        from strop.models.loader import load_scorer

        import tiny_model

        load_scorer(inputs / "model", fresh_head_seed=5).save_pretrained(inputs / "reward_model")
        tiny_model.build_tokenizer().save_pretrained(inputs / "reward_model")
        options = ["reward_model.enable=true", f"reward_model.model.path={inputs / 'reward_model'}"]
        options += ["reward_model.model.input_tokenizer=null"]
    expected = train(overrides(inputs, tmp_path / "local", "trainer.worker_group=local", *options))
    names: dict[str, Any] = {
        "config": load_config(overrides(inputs, tmp_path / "ray", *options)),
        "tokenizer": load_tokenizer(inputs / "model"),
        "RayPPOTrainer": RayPPOTrainer,
        "RewardManager": RewardManager,
    }
    exec(compile(_main(), str(DOCUMENT), "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer.actor, RayWorkerGroup)
    assert ("reward_model" in trainer.groups) == reward_model
    assert hashes(trainer) == hashes(expected)
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "local")
    trainer.shutdown()


def test_the_megatron_branch_of_the_document_imports():
    from strop import NVMegatronRayWorkerGroup

    assert NVMegatronRayWorkerGroup is RayWorkerGroup

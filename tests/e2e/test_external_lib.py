"""A model family and a tokenizer of the user's own package, in the workers of every role on Ray."""

from __future__ import annotations

import json

import pytest
from letters import LetterConfig, LetterForCausalLM, LetterForSequenceClassification, LetterTokenizer

import tiny_model
from runs import make_inputs, overrides, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Prompts, and a policy and a reward model of the family ``letters``."""
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    vocabulary = tiny_model.build_tokenizer().get_vocab()
    (inputs / "letters.json").write_text(json.dumps(vocabulary))
    tokenizer = LetterTokenizer(
        inputs / "letters.json",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=tiny_model.CHAT_TEMPLATE,
    )
    own = tiny_model.build_model(tokenizer, hidden=32).config.to_dict()
    config = LetterConfig(**{**own, "num_labels": 1, "model_type": "letters"})
    models = {"letters": LetterForCausalLM(config), "scorer": LetterForSequenceClassification(config)}
    for name, model in models.items():
        model.save_pretrained(inputs / name)
        tokenizer.save_pretrained(inputs / name)
    return inputs


RUNS = {
    "one rank": "trainer.worker_group=ray",
    "two ranks": "trainer.n_gpus_per_node=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["one rank", pytest.param("two ranks", marks=pytest.mark.slow)])
def test_every_role_on_ray_loads_the_packages_tokenizer(ray_session, inputs, tmp_path, run):
    options = (
        f"actor_rollout_ref.model.path={inputs / 'letters'}",
        "actor_rollout_ref.model.external_lib=letters",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "reward_model.enable=true",
        f"reward_model.model.path={inputs / 'scorer'}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=1",
        RUNS[run],
    )
    train(overrides(inputs, tmp_path, *options)).shutdown()
    exported = json.loads((tmp_path / "final_model" / "letters.json").read_text())
    assert exported == tiny_model.build_tokenizer().get_vocab()

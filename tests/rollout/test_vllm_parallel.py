"""An engine over several ranks, each of which sees one GPU only, as Ray's processes do."""

from __future__ import annotations

import pytest
import torch

from strop.config.load import load_config
from strop.errors import ConfigError, ModelError
from strop.rollout.base import RolloutSpec, SamplingParams
from strop.rollout.in_flight import InFlight

from messages import naming

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm import envs
from vllm.distributed.device_communicators import all_reduce_utils, custom_all_reduce
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMError

from strop.rollout.vllm import engine
from strop.rollout.vllm.arguments import engine_arguments, sampling_arguments

from tiny_lms import prompts_of, tiny_lm


def test_vllms_own_all_reduce_looks_up_a_gpu_that_the_rank_cannot_see(monkeypatch):
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0")
    monkeypatch.setattr(all_reduce_utils, "_gpu_p2p_access_cache", {"0->0": True})  # of one visible GPU
    with pytest.raises(LookupError, match="0->1"):
        custom_all_reduce._can_p2p(0, 2)


def test_engines_over_several_processes_reduce_by_nccl(tmp_path):
    config = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "trainer.n_gpus_per_node=2", "trainer.worker_group=ray", "trainer.device=cpu",
        ]
    )  # fmt: skip
    model = {"path": str(tmp_path), "override_config": {}, "trust_remote_code": False}
    spec = RolloutSpec(
        config=config, model=model, tokenizer=None, tokenizer_path=tmp_path, device=torch.device("cuda"),
        world_size=2,
    )  # fmt: skip
    arguments = engine_arguments(spec, tiny_lm().config)
    assert (arguments["tensor_parallel_size"], arguments["disable_custom_all_reduce"]) == (2, True)
    taken = EngineArgs(**arguments)  # vLLM takes the arguments
    assert taken.disable_custom_all_reduce is True
    assert taken.compilation_config.pass_config.fuse_allreduce_rms is False
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER is False


def test_a_failed_look_up_of_vllm_is_an_error_with_its_reason(monkeypatch):
    def fails(**arguments):
        raise KeyError("0->1")

    monkeypatch.setattr(engine, "LLM", fails)
    monkeypatch.setattr(engine, "why_unsupported", lambda config, device, pictures: None)
    model = tiny_lm()
    with pytest.raises(ModelError, match=naming("did not start", "KeyError", "0->1")):
        engine.VLLMRollout(
            model,
            {"max_num_batched_tokens": 8, "max_model_len": 8},
            device=torch.device("cpu"),
            pad_token_id=0,
            eos_token_ids=[1],
        )


@pytest.mark.parametrize(("turn_length", "limits"), [(None, [2]), (3, None)])
def test_min_tokens_are_at_most_the_tokens_that_there_is_room_for(turn_length, limits):
    """vLLM refuses more, and a run of turns comes to the end of its room."""
    batch = InFlight(prompts_of([3]), SamplingParams(max_tokens=9), turn_length=turn_length, limits=limits)
    arguments = sampling_arguments(batch, 0, {"min_tokens": 8}, ())
    assert arguments["min_tokens"] == arguments["max_tokens"] == batch.room(0) < 8
    vllm.SamplingParams(**arguments)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("repetition_detection", {"max_pattern_size": 4}),
    ],
)
def test_values_that_vllm_refuses_are_errors_of_their_keys(name, refused):
    with pytest.raises(ConfigError, match=naming(f"actor_rollout_ref.rollout.{name}")):
        engine.sampling_options({name: refused})


def test_the_limits_of_keys_are_vllms():
    for name, most in (("temperature", 2.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
        vllm.SamplingParams(**{name: most})
        with pytest.raises(VLLMError):
            vllm.SamplingParams(**{name: most + 0.01})

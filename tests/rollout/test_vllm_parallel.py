"""An engine over several ranks, each of which sees one GPU only, as Ray's processes do."""

from __future__ import annotations

import pytest
import torch

from strop.config.load import load_config
from strop.errors import ModelError
from strop.rollout.base import RolloutSpec

from messages import naming

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import envs
from vllm.distributed.device_communicators import all_reduce_utils, custom_all_reduce
from vllm.engine.arg_utils import EngineArgs

from strop.rollout.vllm import engine
from strop.rollout.vllm.arguments import engine_arguments

from tiny_lms import tiny_lm


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

"""Peaks of memory by phase, and the allocators of a GPU and of the C library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from strop.config.load import load_config, load_tree
from strop.config.trees import SFT
from strop.controller.group import Dispatch, LocalWorkerGroup, register
from strop.trainer.metrics import peak_memory
from strop.workers import memory
from strop.workers.memory import PEAKS, phase, prefer_expandable_segments

import forked

SIZE = 2**26  # numbers in 0.25 GiB
CPU = torch.device("cpu")


class Allocating:
    device = CPU

    def __init__(self):
        self.phases = set()

    @register(Dispatch.ONE_TO_ALL)
    @phase("large")
    def large(self):
        return float(torch.ones(SIZE).sum())

    @register(Dispatch.ONE_TO_ALL)
    @phase("small")
    def small(self, raises=False):
        if raises:
            raise ValueError("wrong")

    @register(Dispatch.ONE_TO_ALL, beside_calls=True)
    def memory_peaks(self):
        return PEAKS.take(self.phases)


def _has_peaks_of_phases():
    group = LocalWorkerGroup(worker_cls=Allocating, init_kwargs={})
    other = LocalWorkerGroup(worker_cls=Allocating, init_kwargs={})
    assert group.large() == SIZE
    group.small()
    with pytest.raises(ValueError, match="wrong"):
        group.small(raises=True)
    assert peak_memory([other, SimpleNamespace()]) == {}  # its own phases alone
    found = peak_memory([group])
    assert found.keys() == {"perf/peak_memory_gb/large", "perf/peak_memory_gb/small"}
    large, small = (found[f"perf/peak_memory_gb/{name}"] for name in ("large", "small"))
    assert small + 0.2 < large < small + 0.5
    assert peak_memory([group]) == {}


def test_each_phase_has_a_peak_of_its_own():
    """In a process without memory that other tests have freed, and that its allocator keeps."""
    done = forked.run(_has_peaks_of_phases)
    assert done.returncode == 0, done.stderr


def test_a_phase_in_another_thread_is_not_cut_short():
    PEAKS.begin(CPU)
    block = torch.ones(SIZE)
    del block
    PEAKS.begin(CPU)  # no new count: the first would lose its peak
    PEAKS.end("inner", CPU)
    PEAKS.end("outer", CPU)
    PEAKS.begin(CPU)
    PEAKS.end("after", CPU)
    found = PEAKS.take({"outer", "after"})
    assert found["outer"] > found["after"] + 0.2


def test_a_system_that_does_not_tell_gives_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROCESS", tmp_path)
    PEAKS.begin(CPU)
    PEAKS.end("unknown", CPU)
    assert PEAKS.take({"unknown"}) == {}


@pytest.fixture
def chosen(monkeypatch):
    """Settings that the allocator got."""
    found = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


EXPANDABLE = ["expandable_segments:True"]
GPU = torch.device("cuda")


def test_segments_expand_on_a_gpu_unless_the_user_chose(chosen, monkeypatch):
    config = load_config(["actor_rollout_ref.rollout.name=hf"])
    prefer_expandable_segments(config, "ActorRollout", CPU)
    assert chosen == []
    prefer_expandable_segments(config, "ActorRollout", GPU)
    prefer_expandable_segments(load_tree(SFT, []), "Model", GPU)
    assert chosen == EXPANDABLE * 2
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512")
            prefer_expandable_segments(config, "ActorRollout", GPU)
    assert chosen == EXPANDABLE * 2


def test_not_where_vllm_sleeps_or_runs_on_several_gpus(chosen):
    vllm = ["actor_rollout_ref.rollout.name=vllm", "trainer.resource_pools={a: [1], b: [1]}",
            "+trainer.placement.Critic=b"]  # fmt: skip
    prefer_expandable_segments(load_config(vllm), "ActorRollout", GPU)
    prefer_expandable_segments(load_config([*vllm, "trainer.worker_group=local"]), "Critic", GPU)
    assert chosen == []  # the second: another pool, in the same process
    prefer_expandable_segments(load_config(vllm), "Critic", GPU)
    awake = load_config([*vllm, "actor_rollout_ref.rollout.free_cache_engine=False"])
    prefer_expandable_segments(awake, "ActorRollout", GPU)
    assert chosen == EXPANDABLE * 2
    several = ["trainer.resource_pools={a: [2], b: [2]}", "actor_rollout_ref.rollout.free_cache_engine=False"]
    two = load_config([*vllm, *several, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
    prefer_expandable_segments(two, "ActorRollout", GPU)
    assert chosen == EXPANDABLE * 2


def test_the_allocator_takes_the_setting():
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@pytest.mark.parametrize(
    ("accepted", "user", "options"),
    [
        (1, {}, [(-3, 1 << 27), (-1, 1 << 29)]),
        (0, {}, [(-3, 1 << 27)]),  # an older glibc: its defaults stay
        *((1, {name: "131072"}, []) for name in memory._MALLOC),
    ],
)
def test_the_c_library_keeps_memory_unless_the_user_chose(accepted, user, options, monkeypatch):
    given = []
    library = SimpleNamespace(mallopt=lambda *option: given.append(option) or accepted)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    for name in memory._MALLOC:
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    memory.keep_freed_memory(CPU)
    memory.keep_freed_memory(torch.device("cuda"))
    assert given == options


def test_another_c_library_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    memory.keep_freed_memory(CPU)

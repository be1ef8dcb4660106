"""Two threads may build models at once, as the pools of an asynchronous local run do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import nn

from strop.models.deferred import _parameters_on_meta, defer_causal_lm
from strop.models.loader import load_causal_lm

import tiny_model


def test_a_thread_that_builds_on_meta_leaves_another_thread_alone():
    inside, built = threading.Event(), threading.Event()

    def on_meta() -> bool:
        with _parameters_on_meta():
            inside.set()
            assert built.wait(10)
            return nn.Linear(2, 2).weight.is_meta

    with ThreadPoolExecutor(1) as pool:
        deferred = pool.submit(on_meta)
        assert inside.wait(10)
        here = nn.Linear(2, 2).weight.is_meta
        built.set()
        assert deferred.result()
        assert not here
    assert not nn.Linear(2, 2).weight.is_meta


def test_models_are_built_by_two_threads_at_once(tmp_path):
    folder = tiny_model.save(tmp_path, hidden=16)
    expected = dict(load_causal_lm(folder).named_parameters())
    barrier = threading.Barrier(2)

    def build(deferred: bool) -> list:
        barrier.wait()
        return [defer_causal_lm(folder) if deferred else load_causal_lm(folder) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        models, loaded = pool.map(build, (True, False))
    assert all(parameter.is_meta for model, _ in models for parameter in model.parameters())
    streamed = [dict(source.stream()) for _, source in models]
    for weights in (*streamed, *(dict(model.named_parameters()) for model in loaded)):
        assert weights.keys() == expected.keys()
        assert all(weights[name].equal(expected[name]) for name in expected)

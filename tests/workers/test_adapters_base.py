"""The base model that an adapter's folder names."""

from __future__ import annotations

import os
from types import SimpleNamespace

import fsspec

from strop.workers.base import Worker


def test_the_base_of_a_model_from_a_url_is_its_local_copy(tmp_path, monkeypatch):
    """An adapter whose base is a URL could not be merged."""
    fsspec.filesystem("memory").pipe("/models/base/config.json", b"{}")
    data, trainer = SimpleNamespace(cache_dir=tmp_path), SimpleNamespace(seed=0)
    worker = SimpleNamespace(config=SimpleNamespace(data=data, trainer=trainer))
    settings = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": None}
    monkeypatch.chdir(tmp_path)
    bases = {}
    for path in ("memory://models/base", "model", "owner/name"):
        model = SimpleNamespace(
            **settings, has_adapters=True, path=path, lora_adapter_path=None, modules_to_save=[]
        )
        (tmp_path / "model").mkdir(exist_ok=True)
        bases[path] = Worker.adapters_of(worker, model, "actor_rollout_ref.model").base
    assert os.path.isfile(os.path.join(bases["memory://models/base"], "config.json"))
    assert bases["model"] == str(tmp_path / "model")
    assert bases["owner/name"] == "owner/name"

"""The chat template of a run, where a rollout renders turns."""

from __future__ import annotations

import worker_jobs as jobs

from strop.controller.pools import Role
from strop.workers.policy import ActorRolloutRefWorker

import tiny_model


def test_a_rollout_renders_by_the_template_of_the_run(tmp_path, monkeypatch):
    specs = []
    monkeypatch.setattr("strop.workers.policy.build_rollout", lambda name, spec: specs.append(spec))
    folder, template = tiny_model.save(tmp_path / "model"), tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    for keys in ((), (f"data.chat_template={template}",)):
        worker = ActorRolloutRefWorker(jobs.config_of(folder, *keys), Role.Rollout)
        worker.init_model()
        assert worker.tokenizer.chat_template == tiny_model.CHAT_TEMPLATE  # an exported model keeps it
    templates = [spec.tokenizer.chat_template for spec in specs]
    assert templates == [tiny_model.CHAT_TEMPLATE, template.read_text()]

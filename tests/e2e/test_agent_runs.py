"""An agent program as a function of a user's script."""

from __future__ import annotations

import strop
from strop.tracking.jsonl import read_metrics

import tiny_model
from runs import undrawn


def test_a_function_is_an_agent_of_train_distill_and_evaluate(tmp_path):
    def counts(question, answer, base_url):  # its process need not import this module
        import json
        import urllib.request

        body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
        found = json.load(urllib.request.urlopen(f"{base_url}/chat/completions", body))
        said = found["choices"][0]["message"]["content"]
        return {"score": float(str(answer) in said), "letters": len(said)}

    models = [tiny_model.save(tmp_path / name, hidden=32, seed=seed) for seed, name in enumerate("ab")]
    rows = [{"question": f"{number}+1=", "answer": number + 1} for number in range(8)]
    data = {"prompt_key": "question", "max_prompt_length": 8, "max_response_length": 6}
    given = {**data, "train_files": rows, "train_batch_size": 8}
    more = {"actor_rollout_ref.rollout.name": "hf", "trainer.device": "cpu", "agent": counts}
    with undrawn():
        for name, train in (
            ("train", lambda **keys: strop.train(models[0], given, **keys)),
            ("distill", lambda **keys: strop.distill(*models, given, **keys)),
        ):
            run = train(steps=1, out=tmp_path / name, **more)
            (line,) = [line for line in read_metrics(run.folder / "metrics.jsonl") if line["step"]]
            assert line["agent/requests"] == line["agent/sessions"]
            assert ("teacher/kl" in line) == (name == "distill")
    found = strop.evaluate(models[0], {**data, "val_files": rows}, out=tmp_path / "evaluation", **more)
    assert set(found.samples["n_turns"]) == {1}
    assert set(found.scores) == {"rows"}

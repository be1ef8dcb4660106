"""Write the tables of docs/gpu_settings.md from the memory forecast of `strop check`.

python docs/generate_gpu_settings.py           write them
python docs/generate_gpu_settings.py --check   exit 1 if the page is stale
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path
from unittest import mock

from generated import write_or_check

from strop.config import machine
from strop.config.batch_plan import BatchPlan
from strop.config.load import load_config
from strop.config.memory.forecast import Forecast, forecast

# config.json of Qwen2.5: parameters, hidden, layers, heads, key-value heads, words
MODELS = {
    "Qwen2.5-0.5B": (494_032_768, 896, 24, 14, 2, 151_936),
    "Qwen2.5-1.5B": (1_543_714_304, 1536, 28, 12, 2, 151_936),
    "Qwen2.5-3B": (3_085_938_688, 2048, 36, 16, 2, 151_936),
    "Qwen2.5-7B": (7_615_616_512, 3584, 28, 28, 4, 152_064),
}
SETTINGS = """\
data.max_prompt_length=512
data.max_response_length=1024
data.train_batch_size=128
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.max_num_seqs=64
actor_rollout_ref.rollout.dtype=bfloat16
actor_rollout_ref.model.compute_dtype=bfloat16
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
trainer.device=cuda"""
# The default depends on the memory, and the tables must not depend on that of the machine that writes them.
WITHOUT_WHOLE_GRADIENTS = [
    f"{section}.fsdp_config.use_no_sync_for_gradient_accumulation=False"
    for section in ("actor_rollout_ref.actor", "critic.model")
]
ALGORITHMS = {
    "GRPO without a reference model": "algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0",
    "GRPO with a KL penalty (a reference model)": "algorithm.adv_estimator=grpo",
    "PPO with a critic of the same size and a KL penalty": """
        algorithm.adv_estimator=gae
        critic.model.compute_dtype=bfloat16
        critic.model.enable_gradient_checkpointing=True
        critic.ppo_micro_batch_size_per_gpu=4""",
}
GPUS = (1, 2, 4, 8)
ONE_CHANGE = {  # key=value: what it is
    "": "as above",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1": "one sequence in a pass",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16": "16 sequences in a pass",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False": "all activations are kept",
    "actor_rollout_ref.model.compute_dtype=float32": "passes in float32",
    "data.max_response_length=8192": "responses eight times as long",
    "actor_rollout_ref.rollout.max_num_seqs=1024": "the default number of samples at once",
    "actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.micro_batch_size_per_gpu=64": "64 at once",
}


def write_model(folder: Path, name: str) -> Path:
    """Write a folder from which sizes can be read: config.json, and weights as a sparse file."""
    parameters, hidden, layers, heads, kv_heads, words = MODELS[name]
    path = folder / name
    path.mkdir()
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "max_position_embeddings": 32_768,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}
    header = json.dumps({"all": tensor}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * parameters)
    return path


def memory_of(model: Path, *settings: str, gpus: int = 1) -> Forecast:
    """Return what `strop check` forecasts for one rank of GPUs of unknown size."""
    config = load_config(
        [
            f"actor_rollout_ref.model.path={model}",
            f"trainer.n_gpus_per_node={gpus}",
            "data.train_files=[train.parquet]",
            "data.val_files=[test.parquet]",
            *WITHOUT_WHOLE_GRADIENTS,
            *SETTINGS.split(),
            *(word for setting in settings for word in setting.split()),
        ]
    )
    # not the GPUs of the machine that writes the tables
    with mock.patch.object(machine, "gpu_memory", return_value=None):
        return forecast(config, BatchPlan.from_config(config))


def tables() -> str:
    """Return the generated part of the page."""
    command = "strop train actor_rollout_ref.model.path=MODEL data.train_files=TRAIN data.val_files=TEST"
    lines = ["```bash", " \\\n    ".join([command, *SETTINGS.splitlines()]), "```", ""]
    with tempfile.TemporaryDirectory() as folder:
        models = {name: write_model(Path(folder), name) for name in MODELS}
        for title, algorithm in ALGORITHMS.items():
            lines += [f"**{title}**: GiB on each GPU at the peak", ""]
            lines += [f"| model | {' | '.join('1 GPU' if n == 1 else f'{n} GPUs' for n in GPUS)} |"]
            lines += ["| --- |" + " ---: |" * len(GPUS)]
            for name, model in models.items():
                peaks = [memory_of(model, algorithm, gpus=gpus).peak for gpus in GPUS]
                lines += [f"| {name} | {' | '.join(_gib(peak) for peak in peaks)} |"]
            lines += [""]
        name, algorithm = "Qwen2.5-1.5B", ALGORITHMS["GRPO without a reference model"]
        lines += [f"**One change to the first table**: {name} on one GPU, GiB", ""]
        lines += [
            "| change | | during the update | during generation | peak |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for change, meaning in ONE_CHANGE.items():
            memory = memory_of(models[name], algorithm, change)
            update, generation = memory.phases.values()
            keys = " ".join(f"`{key}`" for key in change.split())
            lines += [f"| {keys} | {meaning} | {_gib(update)} | {_gib(generation)} | {_gib(memory.peak)} |"]
    return "\n".join(lines)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(write_or_check(__file__, tables(), sys.argv[1:]))

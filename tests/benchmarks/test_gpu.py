"""The benchmark of a GPU, on a CPU with its tiny model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from strop.config.load import load_config
from strop.config.placement import runs_on_ray

import forked

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu


@pytest.fixture(autouse=True)
def no_end(monkeypatch):
    """Let a test that sets a budget of 0 finish on a busy machine; one that fails would end it later."""
    monkeypatch.setattr(gpu, "OVER_S", 600)
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


@pytest.mark.slow
def test_it_compares_and_measures_every_phase(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--models", "tiny", "--out", str(tmp_path / "gpu")])
    assert gpu.main() == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert len(figures["rightness"]) == 11 + 8  # two settings in two precisions
    phases = {line["phase"] for line in figures["speed"] if line.get("s", 0) > 0}
    assert phases == {
        *("generation (hf)", "log-probs", "update", "update, checkpointing"),
        *("GRPO step", "PPO step"),
        *("weights to vLLM in the process", "weights to vLLM after sleep", "generation (vllm)"),
        *("update, segments of fixed size", "update, 8 rows a pass"),
        *("update, padded", "update, no shared prompts", "update, selective checkpointing"),
        *("update, FSDP2", "update, FSDP2, reshard_after_forward=False"),
        "update, FSDP2, use_no_sync_for_gradient_accumulation",
        *("floor: transformers' update", "output layer, log-probs, blocks", "output layer, update, blocks"),
    }
    left_out = {line["phase"]: line["note"] for line in figures["speed"] if "s" not in line}
    assert left_out == {
        **dict.fromkeys(
            (
                *("update, FlexAttention", "update, FlexAttention, selective checkpointing"),
                *("update, compiled layers", "update, offloaded"),
            ),
            "not run: no GPU",
        ),
        **dict.fromkeys(
            ("output layer, log-probs, kernel", "output layer, update, kernel"),
            "not run: no kernel for this device",
        ),
    }
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "note"),
    [
        (RuntimeError("no | kernel\nmore"), "failed: RuntimeError: no / kernel"),
        (gpu.torch.cuda.OutOfMemoryError("no memory"), "out of memory"),
    ],
)
def test_a_case_that_fails_is_a_row_and_every_row_is_on_disk(monkeypatch, tmp_path, error, note):
    engine_of, before = gpu.engine_of, []

    def failing(*arguments, **options):
        if options.get("gradient_checkpointing") == "selective":
            before.append(json.loads((tmp_path / "gpu.json").read_text())["speed"])
            before.append((tmp_path / "gpu.md").read_text())
            raise error
        return engine_of(*arguments, **options)

    monkeypatch.setattr("sys.argv", ["gpu.py", "--models", "tiny", "--out", str(tmp_path / "gpu")])
    monkeypatch.setattr(gpu, "rightness", lambda device: [])
    monkeypatch.setattr(gpu, "engine_of", failing)
    for part in ("inference", "training", "steps", "vllm"):
        monkeypatch.setattr(gpu.Case, part, lambda case: None)
    assert gpu.main() == (note != "out of memory")
    lines = {line["phase"]: line for line in json.loads((tmp_path / "gpu.json").read_text())["speed"]}
    assert lines["update, selective checkpointing"]["note"] == note
    assert lines["update, FSDP2"]["s"] > 0
    written, page = before
    assert [line["phase"] for line in written] == [*lines][: len(written)]
    assert written[-1]["phase"] == "update, no shared prompts"
    assert page.index("update, no shared prompts") < page.index("Published by peers")


def test_a_comparison_that_fails_is_wrong_and_the_others_are_made(monkeypatch):
    infer = gpu.TorchEngine.infer

    def failing(self, *arguments, **options):
        if self.compute_dtype is not None:
            raise RuntimeError("no kernel")
        return infer(self, *arguments, **options)

    monkeypatch.setattr(gpu.TorchEngine, "infer", failing)
    wrong = [name for name, found, bound in gpu.rightness(gpu.torch.device("cpu")) if not found <= bound]
    assert len(wrong) == 6  # log-probs and gradients of three comparisons in bfloat16
    assert all("bfloat16" in name and "RuntimeError: no kernel" in name for name in wrong)


@pytest.mark.slow
def test_an_error_in_any_comparison_is_a_line_and_what_came_before_is_on_disk(monkeypatch, tmp_path):
    page, before = tmp_path / "gpu.md", []

    def failing(device):
        before.append(page.read_text())
        raise RuntimeError("NCCL error")

    monkeypatch.setattr("sys.argv", ["gpu.py", "--budget", "0", "--out", str(tmp_path / "gpu")])
    monkeypatch.setattr(gpu, "_broadcast", failing)
    monkeypatch.setattr(gpu, "SHARE_OF_COMPARISONS", math.inf)
    assert gpu.main() == 1
    assert "| hf rollout: log-probs against a forward pass |" in before[0]
    [line] = [line for line in page.read_text().splitlines() if "weights by broadcast" in line]
    assert (
        line
        == "| weights by broadcast: RuntimeError: NCCL error: weights that differ | nan | 0e+00 | WRONG |"
    )
    figures = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=pytest.fail)
    assert figures["rightness"][-1][1] is None


def test_a_nan_in_any_tensor_and_infinity_are_wrong(monkeypatch, tmp_path):
    ones = {name: gpu.torch.ones(2) for name in "ab"}
    assert math.isnan(gpu.apart({**ones, "b": gpu.torch.tensor([1, math.nan])}, ones))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--budget", "0", "--out", str(tmp_path / "gpu")])
    monkeypatch.setattr(gpu, "rightness", lambda device: [("log-probs", math.inf, 1e-4)])
    assert gpu.main() == 1
    figures = json.loads((tmp_path / "gpu.json").read_text(), parse_constant=pytest.fail)
    assert figures["rightness"] == [["log-probs", None, 1e-4]]


def test_it_needs_no_package_beside_torch_and_transformers():
    """strop's other packages may be missing where a GPU is lent."""
    absent = ["pydantic", "hydra", "omegaconf", "pyarrow", "ray", "vllm", "rich"]
    done = forked.run(_measure_without, absent)
    assert done.returncode == 0, done.stderr
    *lines, vllm = json.loads(done.stdout.splitlines()[-1])
    phases = ["generation (hf)", "log-probs", "log-probs", "update", "update", "floor: transformers' update"]
    assert [line["phase"] for line in lines if line.get("s")] == phases, lines
    assert vllm["note"] == "not run: not installed"


def _measure_without(absent: list[str]) -> None:
    """Print the lines of the tiny model."""
    for module in list(sys.modules):
        if module.partition(".")[0] in ("strop", "gpu", *absent):
            del sys.modules[module]
    sys.modules.update(dict.fromkeys(absent))
    gpu = importlib.import_module("gpu")
    clock, lines = gpu.Clock(gpu.torch.device("cpu"), math.inf), []
    case = gpu.Case("tiny", gpu.SIZES["tiny"], clock, 1.0, gpu.Table(lines))
    case.inference()
    case.update("update", case.batches)
    case.floor()
    case.vllm()
    print(json.dumps(lines))


def test_what_is_under_way_at_the_end_of_the_budget_is_given_up(tmp_path):
    began = time.monotonic()
    done = forked.run(_measure_for_ever, str(tmp_path / "gpu"))
    assert time.monotonic() - began < 60
    assert done.returncode == 1  # of the comparison that came before
    *_, last = json.loads((tmp_path / "gpu.json").read_text())["speed"]
    assert last == {"model": "", "phase": "what was under way, and the rest", "note": "not finished: budget"}


def _measure_for_ever(out: str) -> None:
    sys.argv = ["gpu.py", "--models", "tiny", "--budget", "1", "--out", out]
    gpu.OVER_S = 1
    gpu.rightness = lambda device: [("log-probs", 0.5, 1e-4)]
    gpu.head_speed = lambda clock, table: time.sleep(600)
    gpu.main()


def test_a_cut_model_tells_its_layers_and_the_share_of_the_output_layer():
    """Two products a parameter and token; attention over 32 tokens is below a thousandth."""
    seven, table = gpu.SIZES["7B"], gpu.Table([])
    case = gpu.Case("7B", seven, gpu.Clock(gpu.torch.device("cpu"), math.inf), 1.0, table)
    assert case.cut(seven) is case
    two = case.cut(dataclasses.replace(seven, layers=2))
    tokens, prompts = 2 * 2 * 16, 2 * 16
    head = 2 * tokens * seven.vocabulary * seven.hidden
    body = 2 * (tokens + prompts) * (two.parameters - 2 * seven.vocabulary * seven.hidden)
    assert two.name == f"7B, 2 of 28 layers, head {head / (head + body):.0%}"


def test_a_difference_fails_and_the_budget_names_what_it_leaves_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--models", "tiny", "--budget", "0"])
    monkeypatch.setattr(gpu, "rightness", lambda device: [("log-probs", 0.5, 1e-4)])
    assert gpu.main() == 1
    printed = capsys.readouterr().out
    assert "| log-probs | 5.0e-01 | 1e-04 | WRONG |" in printed
    assert "| others |  |  | not run: budget |" in printed
    assert "| tiny | all |  |  |  |  |  |  | not run: budget |" in printed


@pytest.mark.parametrize(("memory", "layers"), [(10e9, 0), (80e9, 8), (211e9, 27), (212e9, 28), (400e9, 28)])
def test_a_model_is_trained_with_as_many_layers_as_fit(memory, layers):
    """Qwen2.5-7B: 1,089,998,336 parameters without layers, 233,057,792 in each, 18 bytes a parameter.

    So 19.62 GB, and 5.906 GB a layer with activations of 1.711 GB; an eighth of the memory is left.
    """
    seven = gpu.SIZES["7B"]
    assert seven.fitting(memory, 8192) == dataclasses.replace(seven, layers=layers)


def test_a_step_is_that_of_one_gpu_wherever_there_are_more(monkeypatch):
    """Several would need Ray, and its row stands beside rows of one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = []

    def train(model, rows, reward, **given):
        seen.append(
            runs_on_ray(load_config([f"{key}={given[key]}" for key in given if key.startswith("trainer.n")]))
        )
        raise RuntimeError("enough")

    monkeypatch.setattr("strop.train", train)
    case = gpu.Case(
        "tiny", gpu.SIZES["tiny"], gpu.Clock(gpu.torch.device("cpu"), math.inf), 1.0, gpu.Table([])
    )
    with pytest.raises(RuntimeError, match="enough"):
        case.step("grpo")
    assert seen == [False]


def test_the_output_layers_kernel_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(gpu.output_layer, "_has_kernel", lambda device, dtype: True)
    cpu = gpu.torch.device("cpu")
    with gpu.head_by("blocks"):
        assert not gpu._has_kernel(cpu)
    with gpu.head_by("kernel"):
        assert gpu._has_kernel(cpu)
    assert gpu._has_kernel(cpu)


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("CPU", math.nan)],
)
def test_the_published_peak_is_that_of_the_cards_name(card, peak):
    assert gpu.published_peak(card) == pytest.approx(peak * 1e12, nan_ok=True)


def test_operations_are_those_that_torch_counts():
    size, n = gpu.SIZES["tiny"], 2
    batch = gpu.batch_of(3, n, 16, 16, size.vocabulary, uneven=False)
    engine = gpu.engine_of(size, gpu.torch.device("cpu"), "float32", packed=True, trains=False)
    parameters = engine.module.hugging_face_model.num_parameters()
    with FlopCounterMode(display=False) as counter:
        engine.infer(batch, gpu.MicroBatching())
    # torch counts attention's masked half as well.
    assert gpu.operations(size, parameters, batch, n, trains=False) == pytest.approx(
        counter.get_total_flops(), rel=0.1
    )

"""Compare strop with transformers on a tiny random model of every family that has a causal language model.

Every family of ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`` is written to a folder and loaded as a run loads it. The
yardstick is transformers alone: its eager attention, one sequence at a time, without padding, in float32. A
role is ``exact`` if log-probs (values of a critic) agree within 1e-4 and gradients within 1e-3 of their norm,
in the modes of inference and of the update. Otherwise it must be refused by an error of strop's.

vLLM takes longer to start than all other comparisons of a family, so ``--vllm`` samples from some families.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_families import VOCABULARY, families, model_type_of, save_tiny, tiny_config
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from strop.engines.base import EngineSpec, ModelSpec, OptimizerSettings
from strop.engines.megatron.settings import FAMILIES
from strop.engines.micro_batches import MicroBatching
from strop.engines.torch.engine import TorchEngine
from strop.errors import StropError
from strop.models.base import RoleModel
from strop.models.comparison import few_rows
from strop.protocol import DataProto
from strop.rollout.base import RolloutEngine, SamplingParams
from strop.rollout.hf.engine import HFRollout
from strop.rollout.weights import checksums, require_equal_checksums

LOG_PROBS, GRADIENTS = 1e-4, 1e-3
COLUMNS = ("padded", "packed", "hf rollout", "critic")
IN_VLLM = (
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2"),
    *("gemma3_text", "phi3", "granite", "olmo2", "gpt_neox", "opt", "falcon", "gpt_oss", "phimoe"),
)
"""The most used families that vLLM has."""
WIDE_HEADS = {
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), 128),
    "head_dim": 32,
    "ffn_hidden_size": 512,
}
"""Sizes of models for vLLM: a CPU's attention takes no heads of 8 dimensions, Falcon one width of layers."""
PUBLISHED = {"phimoe": {"router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True}}
"""Settings of a family's published models, where vLLM has no others."""
EXACT = "exact"
PROMPTS, RESPONSES = (1, 7, 3, 5), (6, 2, 4, 1)
FIRST_TOKEN = 3  # ids below are special

NOT_TEXT_DECODERS = {
    "gemma4_assistant": "drafts tokens for another model, from its hidden states",
    "gemma4_unified_assistant": "drafts tokens for another model, from its hidden states",
    "musicgen": "decoder of sounds, conditioned on a text encoder",
    "musicgen_melody": "decoder of sounds, conditioned on a text encoder",
    "gemma3n": "image and sound encoders need the package timm; its text model is gemma3n_text",
    "trocr": "decoder half of an image-to-text model",
}
"""Families that are not built, with the reason. Encoder-decoders are found by their configuration."""


@dataclass
class Findings:
    """What was found for a family: a column's verdict, ``exact`` or why not."""

    family: str
    model: str
    verdicts: dict[str, str] = field(default_factory=dict)
    excluded: str = ""

    @property
    def wrong(self) -> dict[str, str]:
        """Verdicts that are neither exact nor an error of strop's."""
        return {
            column: verdict
            for column, verdict in self.verdicts.items()
            if not verdict.startswith((EXACT, "refused: "))
        }


def batch() -> dict[str, Tensor]:
    """Return left-padded prompts and right-padded responses of uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor(PROMPTS)[:, None], torch.tensor(RESPONSES)[:, None]
    width, response_width = max(PROMPTS), max(RESPONSES)
    response_mask = torch.arange(response_width) < responses
    mask = torch.cat([torch.arange(width) >= width - prompts, response_mask], dim=1).long()
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, mask.shape, generator=generator) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "responses": ids[:, width:],
        "response_mask": response_mask.float(),
    }


def by_row(model: PreTrainedModel, columns: Mapping[str, Tensor], head: Tensor | None = None) -> Tensor:
    """Return log-probs of the responses, or values with a ``head`` [1, H], of single unpadded sequences.

    Zero where the response mask is 0, as strop's.
    """
    rows = []
    for ids, mask, response_mask in zip(
        columns["input_ids"], columns["attention_mask"], columns["response_mask"], strict=True
    ):
        own, length = ids[mask.bool()][None], int(response_mask.sum())
        if head is None:
            log_probs = model(input_ids=own, use_cache=False).logits[0].float().log_softmax(-1)
            found = log_probs[-length - 1 : -1].gather(-1, own[0, -length:, None])[:, 0]
        else:
            hidden = decoder(model)(input_ids=own, use_cache=False).last_hidden_state[0]
            found = (hidden[-length - 1 : -1] @ head.T)[:, 0]
        rows.append(torch.nn.functional.pad(found, (0, len(response_mask) - length)))
    return torch.stack(rows)


def decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the language model without its output layer; Llama 4 does not call it ``base_model``."""
    return model.model if model.base_model is model else model.base_model


def is_causal(model: PreTrainedModel) -> bool:
    """Return True if the logits of tokens do not depend on later ones."""
    ids = torch.arange(FIRST_TOKEN, FIRST_TOKEN + 9)
    other = torch.cat([ids[:-1], ids[:1]])
    with torch.no_grad():
        logits = [model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in (ids, other)]
    return torch.allclose(*logits, atol=LOG_PROBS)


def gradient(model: PreTrainedModel, outputs: Tensor) -> dict[str, Tensor]:
    """Return gradients of a fixed combination of ``outputs`` [B, T] by name, zeros where there is none."""
    model.zero_grad(set_to_none=True)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    (outputs * weights).sum().backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().clone()
        for name, weight in model.named_parameters()
    }


def verdict(
    outputs: Mapping[str, Tensor],
    expected: Tensor,
    found: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> str:
    """Return ``exact``, or the differences; ``outputs`` by mode, gradients by parameter name."""
    worst = {mode: float((output - expected).abs().max()) for mode, output in outputs.items()}
    shared = [name for name in gradients if name in found]
    difference = sum(float((found[name] - gradients[name]).double().square().sum()) for name in shared) ** 0.5
    norm = sum(float(gradients[name].double().square().sum()) for name in shared) ** 0.5
    relative = difference / max(norm, 1e-30)
    if all(error <= LOG_PROBS for error in worst.values()) and relative <= GRADIENTS and norm > 0:
        return EXACT
    figures = [f"{error:.1e} in {mode} mode" for mode, error in worst.items()]
    return f"WRONG: {', '.join(figures)}, gradients {relative:.1e}"


class Family:
    """A tiny model of a family on disk, with transformers' own results on it."""

    def __init__(self, family: str, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.reference = save_tiny(family, folder, **settings)
        self.columns = batch()

    @functools.cached_property
    def log_probs(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Transformers' log-probs and gradients."""
        found = by_row(self.reference, self.columns)
        return found.detach(), gradient(self.reference, found)

    def compare(self, role: Any, output: str, expected: Tensor, gradients: Mapping[str, Tensor]) -> str:
        """Run ``role`` in both modes, and compare."""
        outputs = {}
        with torch.no_grad():
            outputs["eval"] = role.eval()(self.columns)[output]
        trained = role.train()(self.columns)[output]
        outputs["train"] = trained.detach()
        found = gradient(role.hugging_face_model, trained)
        return verdict(outputs, expected, found, gradients)

    def role(self, kind: Any, folder: Path | None = None, **spec: Any) -> RoleModel:
        """Return a model as a run's engine builds it, with its checks."""
        return self.engine(kind, folder, **spec).module

    def engine(self, kind: Any, folder: Path | None = None, **spec: Any) -> TorchEngine:
        """Return an engine as a run builds it, with its checks."""
        options = {"override_config": {}, "trust_remote_code": False, "attn_implementation": None}
        section = SimpleNamespace(param_offload=False, model_dump=dict)
        optimizer = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.0, eps=1e-8, grad_clip=1.0)
        return TorchEngine.build(
            ModelSpec(kind=kind, path=folder or self.folder, options=options, **spec),
            EngineSpec(device=torch.device("cpu"), section=section, optimizer=optimizer),
        )

    def policy(self, *, packed: bool) -> str:
        """Compare log-probs."""
        return self.compare(self.role("policy", packed=packed), "log_prob", *self.log_probs)

    def checkpointing(self) -> str:
        """Compare gradients with checkpointing, of packed rows where the family takes them, and without."""
        samples, found = DataProto.from_dict(few_rows(VOCABULARY, torch.device("cpu"))), []

        def loss(
            outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return (outputs["log_prob"] * columns["responses"] * columns["response_mask"]).sum(), {}

        for recomputed in (False, True, "selective"):
            engine = self.engine("policy", packed="auto", gradient_checkpointing=recomputed)
            engine.forward_backward(samples, loss, MicroBatching(rows=2), temperature=1.0)
            weights = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
            found.append(torch.cat([weight.flatten() for weight in weights]))
        plain, *others = found
        errors = [
            float((other - plain).norm() / plain.norm()) if other.shape == plain.shape else float("inf")
            for other in others
        ]
        if plain.norm() > 0 and max(errors) <= 1e-5:
            return EXACT
        return f"WRONG: gradients {errors[0]:.1e}, selective {errors[1]:.1e}"

    def rollout(self) -> str:
        """Compare the samples of ``rollout.name=hf``."""
        trainer = self.role("policy")
        return self.sampled(HFRollout(trainer.hugging_face_model, pad_token_id=0, eos_token_ids=[1]), trainer)

    def vllm(self) -> str:
        """Compare the samples of ``rollout.name=vllm``, with weights that the trainer sends."""
        from strop.rollout.vllm.engine import VLLMRollout

        trainer = self.role("policy")
        arguments = {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "dtype": torch.float32,
            "load_format": "dummy",
            "max_model_len": 32,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 1 << 24,
            "enforce_eager": True,
        }
        rollout = VLLMRollout(
            trainer.hugging_face_model,
            arguments,
            device=torch.device("cpu"),
            pad_token_id=0,
            eos_token_ids=[1],
        )
        weights = trainer.hugging_face_model.named_parameters
        rollout.update_weights(weights())
        expected = checksums(trainer.layout.convert(weights()), torch.float32)
        require_equal_checksums(expected, rollout.checksums(), version=1)
        return self.sampled(rollout, trainer)

    def sampled(self, rollout: RolloutEngine, trainer: RoleModel) -> str:
        """Compare the log-probs that a rollout records with transformers', and the trainer's with them."""
        width = max(PROMPTS)
        prompts = {
            name: self.columns[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")
        }
        prompts["seeds"] = torch.arange(2 * len(PROMPTS)).view(-1, 2)
        samples = rollout.generate(DataProto.from_dict(prompts), SamplingParams(max_tokens=9, n=2)).batch
        with torch.no_grad():
            theirs, ours = by_row(self.reference, samples), trainer.eval()(samples)["log_prob"]
        recorded = samples["rollout_log_probs"]
        errors = [float((recorded - others).abs().max()) for others in (theirs, ours)]
        if max(errors) <= LOG_PROBS:
            return EXACT
        return (
            f"WRONG: log-probs differ by {errors[0]:.1e} from transformers, {errors[1]:.1e} from the trainer"
        )

    def critic(self) -> str:
        """Compare values, and a critic or reward model that was saved and loaded with the first."""
        fresh = self.role("value", head_seed=0).hugging_face_model
        head = fresh.get_parameter("score.weight").detach().clone().requires_grad_()
        expected = by_row(self.reference, self.columns, head)
        gradients = gradient(self.reference, expected)
        head_gradient = head.grad.clone()
        (self.folder / "saved").mkdir(exist_ok=True)
        fresh.save_pretrained(self.folder / "saved")
        again = self.role("value", self.folder / "saved").hugging_face_model
        unequal = [
            name for name, weight in fresh.named_parameters() if not again.get_parameter(name).equal(weight)
        ]
        if unequal:
            return f"WRONG: {unequal[0]} changes when a critic is saved and loaded"
        prefix = next(
            name for name, part in self.reference.named_modules() if part is decoder(self.reference)
        )
        base = [name for name in gradients if name.startswith(f"{prefix}.")]
        gradients = {name.replace(prefix, again.base_model_prefix, 1): gradients[name] for name in base}
        gradients["score.weight"] = head_gradient
        found = self.compare(
            self.role("value", self.folder / "saved"), "values", expected.detach(), gradients
        )
        if found != EXACT:
            return found
        with torch.no_grad():
            scores = self.role("score", self.folder / "saved").eval()(self.columns)["rm_scores"]
            masks = self.columns["attention_mask"].bool()
            rows = [ids[mask][None] for ids, mask in zip(self.columns["input_ids"], masks, strict=True)]
            last = [
                decoder(self.reference)(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
                for ids in rows
            ]
        error = float((scores - (torch.stack(last) @ head.T)[:, 0]).abs().max())
        return EXACT if error <= LOG_PROBS else f"WRONG: scores of a reward model differ by {error:.1e}"


def attempt(check: Callable[[], str]) -> str:
    """Return a check's verdict; an error of strop's as ``refused``, any other as ``CRASH``."""
    try:
        return check()
    except StropError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - the finding
        return f"CRASH: {type(error).__name__}: {error}".split("\n")[0]


def examine(family: str, folder: Path) -> Findings:
    """Compare one family in every role."""
    findings = Findings(family, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type_of(family)]))
    kind = CONFIG_MAPPING[model_type_of(family)]
    findings.excluded = NOT_TEXT_DECODERS.get(family, "")
    if not findings.excluded and kind().is_encoder_decoder:
        findings.excluded = "decoder half of an encoder-decoder model"
    if findings.excluded:
        return findings
    try:
        built = Family(family, folder)
    except Exception as error:  # noqa: BLE001 - the finding
        findings.verdicts = dict.fromkeys(
            COLUMNS, f"NOT BUILT: {type(error).__name__}: {error}".split("\n")[0]
        )
        return findings
    checks = {
        "padded": functools.partial(built.policy, packed=False),
        "packed": functools.partial(built.policy, packed=True),
        "hf rollout": built.rollout,
        "critic": built.critic,
        "checkpointing": built.checkpointing,
    }
    findings.verdicts = {column: attempt(check) for column, check in checks.items()}
    if EXACT in findings.verdicts.values() and not is_causal(built.reference):
        findings.verdicts = {
            column: "WRONG: later tokens change earlier ones" if verdict == EXACT else verdict
            for column, verdict in findings.verdicts.items()
        }
    return findings


def run(names: list[str]) -> Iterator[Findings]:
    """Examine families one after another."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in names:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield examine(name, Path(folder))


def sample_with_vllm(family: str) -> str:
    """Return the verdict of a family in vLLM; all engines run in this process, one after another."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    names = tiny_config(family).to_dict()
    sizes = {name: size for name, size in WIDE_HEADS.items() if name in names}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = Family(family, Path(folder), **sizes, **PUBLISHED.get(family, {}))
        try:
            return attempt(built.vllm)
        finally:
            cleanup_dist_env_and_memory()


def table(found: list[Findings]) -> str:
    """Return a Markdown table of all families, with the messages of refusals below it."""
    columns = ("padded", "packed", "hf rollout", "vLLM", "critic", "Megatron")
    notes: dict[str, int] = {}
    lines = [f"| model type | class | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for family in found:
        if family.excluded:
            lines.append(
                f"| {family.family} | {family.model} | not a text decoder: {family.excluded} |||||| "
            )
            continue
        verdicts = {
            "vLLM": "not run",
            **family.verdicts,
            "Megatron": "yes" if family.family in FAMILIES else "no",
        }
        cells = [_cell(verdicts[column], notes) for column in columns]
        lines.append(f"| {family.family} | {family.model} | {' | '.join(cells)} |")
    messages = "\n".join(f"{number}. {note}" for note, number in notes.items())
    return "\n".join(line.rstrip() for line in lines) + f"\n\nMessages of refusals:\n\n{messages}\n"


def _cell(verdict: str, notes: dict[str, int]) -> str:
    """Return a verdict, with the number of its message if it is refused."""
    if not verdict.startswith("refused: "):
        return "yes" if verdict == EXACT else verdict
    message = verdict.removeprefix("refused: ")
    for pattern, general in _GENERAL.items():
        message = re.sub(pattern, general, message)
    return f"refused ({notes.setdefault(message, len(notes) + 1)})"


_GENERAL = {
    r"/tmp/\S+?(?=[:,;]|$)": "PATH",
    r"\b\w+(For(CausalLM|ConditionalGeneration|SequenceClassification)|LMHeadModel|LMHead)\b": "MODEL",
    r"\b\d+(\.\d+)?(e[-+]\d+)?\b(?=\)| \(of| in | of their norm,)": "X",
    r"\['[^]]*'\]": "[...]",
    r"generate with \w+:": "generate with TYPE:",
    r"(?s)(?<=does not load them: ).*": "vLLM's message, with a name of a weight",
    r"\n": " ",
}
"""Parts of messages that depend on the model, for one number per message."""
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARK = "<!-- written by `make families` -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types or variants; default: all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    parser.add_argument(
        "--vllm",
        nargs="*",
        metavar="FAMILY",
        help="sample from these families with vLLM as well; without names, from the most used ones",
    )
    arguments = parser.parse_args()
    found = {}
    for family in run(arguments.families or families()):
        found[family.family] = family
        print(
            json.dumps({"family": family.family, "excluded": family.excluded, **family.verdicts}), flush=True
        )
    for name in () if arguments.vllm is None else arguments.vllm or IN_VLLM:
        found[name].verdicts["vLLM"] = sample_with_vllm(name)
        print(json.dumps({"family": name, "vLLM": found[name].verdicts["vLLM"]}), flush=True)
    if arguments.write:
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + table([*found.values()]))
    if wrong := {family.family: family.wrong for family in found.values() if family.wrong}:
        raise SystemExit(f"not exact, and not refused: {json.dumps(wrong, indent=2)}")


if __name__ == "__main__":
    main()

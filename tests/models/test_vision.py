"""Passes with pictures against transformers' own, row by row in float64, for seven families."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from strop import pictures
from strop.data.pictures.expand import load_image_processor
from strop.engines.micro_batches import MicroBatching, columns_of
from strop.errors import ModelError
from strop.models import vision
from strop.models.comparison import require_eager_figures, try_kept_results
from strop.models.heads import part_of, policy_class
from strop.models.loader import load_causal_lm, load_scorer
from strop.models.lora import Adapters, LoraSettings
from strop.models.packing import Packing
from strop.models.passes.compiled import CompiledLayers
from strop.models.passes.low_precision import low_precision
from strop.models.policy import PolicyModel
from strop.models.prompts_once import PromptsOnce, first_with_prompt
from strop.models.scorer import SequenceScorer, ValueModel
from strop.models.vision import PictureReader
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams
from strop.rollout.hf import decoding
from strop.rollout.hf.decoding import Contexts
from strop.rollout.hf.engine import HFRollout

import picture_models

FAST = ("qwen2_5_vl", "smolvlm", "gemma3")
FAMILIES = [
    pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in picture_models.FAMILIES
]
SIZES = {"a": (56, 56), "b": (56, 56), "c": (112, 56), "d": (70, 98)}
PROMPTS = ("a", "b", "c", "da", "", "a")
"""Pictures of each prompt; the first two and the last have equal texts."""
TEXTS = ((20, 21, 22), (20, 21, 22), (23, 24), (25, 26, 27, 28), (29, 30, 31), (20, 21, 22))
N, T = 3, 8
COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "images")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[..., Path]:
    made: dict[Any, Path] = {}

    def folder(kind: str, **options: Any) -> Path:
        key = kind, *options.items()
        if key not in made:
            made[key] = picture_models.make(kind, tmp_path_factory.mktemp(kind), **options)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def held() -> dict[str, int]:
    """Name -> digest of random pictures."""
    found = {}
    for number, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(number).integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        found[name] = pictures.hold(file.getvalue())
    return found


def loud(model: torch.nn.Module) -> Any:
    """Make weights larger than at initialization, so that pictures matter; a projector of zeros random."""
    torch.manual_seed(1)
    factor = 2 if model.config.model_type == "gemma3" else 3  # its own float32 is farther from float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(factor) if weight.any() else weight.normal_(std=0.05)
    return model


def reader_for(model: Any, folder: Path) -> PictureReader:
    return PictureReader(model, load_image_processor(folder))


def own_pixels(reader: PictureReader, digests: list[int]) -> dict[str, Tensor]:
    """The image processor's output for the pictures of a row, in one call."""
    found = reader._processor([[pictures.opened(digest) for digest in digests]], return_tensors="pt")
    return {name: found[name] for name in reader._processor.model_input_names if name in found}


def tokens_of(model: Any, reader: PictureReader, digest: int) -> int:
    """Tokens of a picture, by the features that transformers computes."""
    with torch.no_grad():
        found = model.base_model.get_image_features(**own_pixels(reader, [digest]), return_dict=True)
    return sum(map(len, found.pooler_output))


def prompts_of(model: Any, reader: PictureReader, held: dict[str, int]) -> DataProto:
    rows = []
    for names, text in zip(PROMPTS, TEXTS, strict=True):
        ids = [text[0]]
        for name in names:
            ids += [reader.placeholder] * tokens_of(model, reader, held[name]) + [text[1]]
        rows.append([*ids, *text[1:]])
    width = max(map(len, rows)) + 2
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
    images = [[held[name] for name in names] + [0] * (2 - len(names)) for names in PROMPTS]
    return DataProto(
        {
            "input_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in rows]),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "images": torch.tensor(images),
            "seeds": torch.arange(len(rows) * N).view(-1, N) + 7,
        }
    )


def samples_of(model: Any, reader: PictureReader, held: dict[str, int]) -> DataProto:
    """Samples of rollout hf, and for each place of a response one in which a placeholder was sampled."""
    rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[2], reader=reader)
    batch = rollout.generate(prompts_of(model, reader, held), SamplingParams(n=N, max_tokens=T))
    return batch


def with_placeholders(batch: DataProto, token: int) -> DataProto:
    """The same with a placeholder sampled in each row, at another place from row to row."""
    columns = {name: batch.batch[name].clone() for name in batch.batch}
    width = columns["input_ids"].shape[1] - T
    for row in range(len(batch)):
        columns["responses"][row, row % T] = columns["input_ids"][row, width + row % T] = token
    return DataProto(columns)


@contextlib.contextmanager
def embedded_by_hand(model: Any, reader: PictureReader, sampled: Tensor) -> Generator[None]:
    """Embed sampled placeholders, which transformers takes for a picture's."""
    embeddings = model.get_input_embeddings()
    own = embeddings(torch.tensor([reader.placeholder]))[0]
    hook = embeddings.register_forward_hook(
        lambda _, inputs, output: torch.where(sampled[..., None], own, output)
    )
    yield
    hook.remove()


def with_turns(batch: DataProto, reader: PictureReader, held: dict[str, int], count: int) -> DataProto:
    """The same with an answer after the second token that has a picture of ``count`` tokens, or two or none.

    The token before it is a placeholder in every other row, as if it were sampled.
    """
    old, n_rows = batch.batch, len(batch)
    width, marks = old["input_ids"].shape[1] - T, [reader.placeholder] * count
    one, inserted = held["c"], 2 * count + 3
    columns = {name: torch.zeros(n_rows, T + inserted, dtype=torch.int64) for name in ("ids", "real", "at")}
    mask = torch.zeros(n_rows, T + inserted)
    for row in range(n_rows):
        own = int(old["response_mask"][row].sum())
        pieces = [[20, *marks, 21, *marks, 22], [20, *marks, 21], [20, 21]][row % 3]
        at = [0 if token != reader.placeholder else -1 for token in pieces]
        for place in [1, count + 2][: 2 - row % 3]:
            at[place] = one
        ids = old["responses"][row, :own].tolist()
        if row % 2:
            ids[1] = reader.placeholder
        ids, sampled = [*ids[:2], *pieces, *ids[2:]], [1, 1, *[0] * len(pieces), *[1] * (own - 2)]
        columns["ids"][row, : len(ids)], columns["real"][row, : len(ids)] = torch.tensor(ids), 1
        columns["at"][row, 2 : 2 + len(at)], mask[row, : len(ids)] = torch.tensor(at), torch.tensor(sampled)
    attention = torch.cat([old["attention_mask"][:, :width], columns["real"]], dim=1)
    return DataProto(
        {
            "input_ids": torch.cat([old["input_ids"][:, :width], columns["ids"]], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "responses": columns["ids"],
            "response_mask": mask,
            "images": old["images"],
            "images_at": columns["at"],
        }
    )


def reference(
    model: Any, reader: PictureReader, batch: DataProto
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Log-probs [B, T] of transformers' forward pass on each row alone in float64, gradients, weights."""
    double = copy.deepcopy(model).double()
    mask_BT = batch.batch["response_mask"].bool()
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(mask_BT.shape, generator=random).double() * mask_BT
    found = torch.zeros(mask_BT.shape, dtype=torch.float64)
    width = batch.batch["input_ids"].shape[1] - mask_BT.shape[1]
    at_BT = batch.batch.get("images_at", torch.zeros(mask_BT.shape, dtype=torch.int64))
    for row in range(len(batch)):
        prompt, response = (
            int(part.sum()) for part in batch.batch["attention_mask"][row].tensor_split([width])
        )
        ids = batch.batch["input_ids"][row, width - prompt : width + response][None]
        of_turns = torch.cat([torch.zeros(prompt, dtype=torch.bool), at_BT[row, :response] != 0])
        arguments: dict[str, Any] = {}
        in_order = [*batch.batch["images"][row].tolist(), *at_BT[row].tolist()]
        if digests := [digest for digest in in_order if digest > 0]:
            pixels = own_pixels(reader, digests)
            arguments = {n: x.double() if x.is_floating_point() else x for n, x in pixels.items()}
            types = (ids == reader.placeholder) & ((torch.arange(ids.shape[1]) < prompt) | of_turns)
            if hasattr(double.base_model, "get_rope_index"):
                arguments["mm_token_type_ids"] = types.int()
            if model.config.model_type == "gemma3":
                arguments["token_type_ids"] = types.long()
        sampled = (ids == reader.placeholder) & (torch.arange(ids.shape[1]) >= prompt) & ~of_turns
        with embedded_by_hand(double, reader, sampled):
            logits = double(input_ids=ids.masked_fill(sampled, 1), **arguments).logits
        log_probs = logits[0, prompt - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(1, ids[0, prompt:, None])[:, 0]
        (chosen * weights[row, :response]).sum().backward()
        found[row, :response] = chosen.detach()
    return found, {n: w.grad for n, w in double.named_parameters() if w.grad is not None}, weights


def distance(model: Any, gradients: dict[str, Tensor], *, of_encoder: bool = False) -> float:
    """Norm of the difference of gradients, over their norm."""
    marks = ("visual", "vision", "connector", "project")
    names = [n for n in gradients if not of_encoder or any(mark in n for mark in marks)]
    weights = dict(model.named_parameters())
    difference = sum((weights[n].grad.double() - gradients[n]).square().sum() for n in names)
    return float((difference / sum(gradients[n].square().sum() for n in names)).sqrt())


def pass_over(module: PolicyModel, batch: DataProto, rows: int, weights: Tensor) -> Tensor:
    """Log-probs [B, T] of the role's passes, whose weighted sum is differentiated."""
    data = DataProto({name: batch.batch[name] for name in (*COLUMNS, "images_at") if name in batch.batch})
    found = torch.zeros(weights.shape)
    for piece in MicroBatching(rows=rows).split(data, packed=bool(module.packed)):
        log_probs = module(columns_of(data, piece, torch.device("cpu")), with_entropy=False)["log_prob"]
        width = log_probs.shape[1]
        (log_probs.double() * weights[piece][:, :width]).sum().backward()
        found[piece, :width] = log_probs.detach()
    return found


@pytest.mark.fast("qwen2_5_vl", "smolvlm")
@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_family_row_by_row(folders, held, kind):
    folder = folders(kind)
    model = loud(load_causal_lm(folder))
    reader = reader_for(model, folder)
    sampled = samples_of(model, reader, held)
    turns = with_turns(sampled, reader, held, tokens_of(model, reader, held["c"]))
    for batch in (sampled, with_placeholders(sampled, reader.placeholder), turns):
        mask = batch.batch["response_mask"].bool()
        expected, gradients, weights = reference(model, reader, batch)
        if batch is sampled:
            by_rollout = batch.batch["rollout_log_probs"].double()
            assert (by_rollout - expected).abs()[mask].max() < 5e-6
        for packed in (False, True):
            module = PolicyModel(model, packed=packed)
            module.reader = reader
            for rows in (1, 4, len(batch)):
                model.zero_grad()
                found = pass_over(module, batch, rows, weights)
                assert (found.double() - expected).abs()[mask].max() < 5e-6
                assert distance(model, gradients) < 5e-6
                assert distance(model, gradients, of_encoder=True) < 3e-5


def test_smolvlm_in_crops(folders, held):
    folder = folders("smolvlm", split=True)
    model = loud(load_causal_lm(folder))
    reader = reader_for(model, folder)
    batch = samples_of(model, reader, held)
    expected, gradients, weights = reference(model, reader, batch)
    module = PolicyModel(model, packed=True)
    module.reader = reader
    found = pass_over(module, batch, len(batch), weights)
    assert (found.double() - expected).abs()[batch.batch["response_mask"].bool()].max() < 5e-6
    assert distance(model, gradients) < 5e-6


def test_equal_text_with_another_picture_is_another_prompt(folders, held):
    folder = folders("smolvlm")
    model = load_causal_lm(folder)
    batch = samples_of(model, reader_for(model, folder), held)
    firsts = first_with_prompt(batch.batch).tolist()
    # the last prompt has text and picture of the first one, the second only its text
    assert firsts == [0] * 3 + [3] * 3 + [6] * 3 + [9] * 3 + [12] * 3 + [0] * 3
    data = {name: batch.batch[name] for name in COLUMNS}
    computed = PromptsOnce.of(data, with_last=True).computed_BL
    width = data["input_ids"].shape[1] - T
    assert computed[:, :width].any(1).tolist() == [row == first for row, first in enumerate(firsts)]


@pytest.fixture
def encoded(monkeypatch) -> list[list[int]]:
    """The pictures of each call of an encoder."""
    calls: list[list[int]] = []
    pixels = PictureReader._pixels
    monkeypatch.setattr(
        PictureReader,
        "_pixels",
        lambda self, digests, device: calls.append(list(digests)) or pixels(self, digests, device),
    )
    return calls


def test_only_pictures_of_computed_prompts_are_encoded(folders, held, encoded):
    folder = folders("smolvlm")
    model = load_causal_lm(folder)
    module = PolicyModel(model, packed=True)
    module.reader = reader_for(model, folder)
    batch = samples_of(model, module.reader, held)
    module.reader._takes_features = False
    encoded.clear()
    module(columns_of(batch, torch.arange(len(batch)), torch.device("cpu")), with_entropy=False)
    module.packed = False
    module(columns_of(batch, torch.arange(len(batch)), torch.device("cpu")), with_entropy=False)
    assert [*map(len, encoded)] == [5, 18]  # of five prompts, not of 18 samples


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_picture_of_several_rows_of_a_pass_is_encoded_once(folders, held, encoded, kind, packed):
    module = of_family(folders, kind, packed)
    batch = samples_of(module.hugging_face_model, module.reader, held)
    encoded.clear()
    module(columns_of(batch, torch.arange(len(batch)), torch.device("cpu")), with_entropy=False)
    assert [*map(sorted, encoded)] == [sorted(held.values())]  # its figures: test_log_probs_and_gradients


@pytest.mark.parametrize("kind", FAMILIES)
def test_pictures_of_samples_in_flight_are_encoded_once(folders, held, encoded, monkeypatch, kind):
    """A sample with tokens is a context of its own, in whichever pass."""
    model = loud(load_causal_lm(folders(kind)))
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS", 64)
    lengths = torch.arange(1, len(PROMPTS) * N + 1) % 4  # four are contexts of prompts
    tokens = torch.arange(20, 24).repeat(len(lengths), 1)
    begun = Samples(tokens, torch.zeros(tokens.shape), lengths, torch.ones(len(lengths), dtype=torch.bool))
    results = []
    for once in (True, False):
        reader = reader_for(model, folders(kind))
        rollout = HFRollout(model, pad_token_id=0, eos_token_ids=[2], reader=reader)
        reader._takes_features = once
        rollout.admit(0, prompts_of(model, reader, held), SamplingParams(n=N, max_tokens=T))
        rollout._queue.from_oldest(0)[0].add(torch.arange(len(lengths)), begun, 0)
        encoded.clear()
        results.append((rollout.finish(0, 1).batch, [digest for call in encoded for digest in call]))
    (found, distinct), (expected, all_of_them) = results
    assert len(all_of_them) > 2 * len(distinct)
    assert sorted(distinct) == sorted(set(all_of_them)) == sorted(held.values())
    assert found["responses"].equal(expected["responses"])
    torch.testing.assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", picture_models.FAMILIES)
def test_a_rank_without_pictures_encodes_a_blank_one_to_no_effect(folders, kind):
    model = load_causal_lm(folders(kind))
    embedded = torch.ones(1, 3, model.config.get_text_config().hidden_size)
    found = reader_for(model, folders(kind))._with_blank(embedded)
    assert found.equal(embedded)
    found.sum().backward()
    of_parts = [(part_of(name), weight.grad) for name, weight in model.named_parameters()]
    assert {part for part, gradient in of_parts if gradient is not None} == {"encoder", "projector"}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "llava"])
@pytest.mark.parametrize("kind", ["value", "score"])
def test_values_and_scores_are_those_of_the_family(folders, held, kind, family):
    folder = folders(family)
    policy = load_causal_lm(folder)
    batch = samples_of(policy, reader_for(policy, folder), held)
    model = loud(load_scorer(folder, fresh_head_seed=0))
    reader, double = reader_for(model, folder), copy.deepcopy(model).double()
    expected = torch.zeros(len(batch), T, dtype=torch.float64)
    mask_BT = batch.batch["response_mask"].bool()
    with torch.no_grad():
        width = batch.batch["input_ids"].shape[1] - T
        for row in range(len(batch)):
            prompt = int(batch.batch["attention_mask"][row, :width].sum())
            length = int(mask_BT[row].sum())
            ids = batch.batch["input_ids"][row, width - prompt : width + length][None]
            digests = [digest for digest in batch.batch["images"][row].tolist() if digest]
            more = own_pixels(reader, digests) if digests else {}
            more = {name: x.double() if x.is_floating_point() else x for name, x in more.items()}
            if digests and family == "qwen2_5_vl":
                types = (ids == reader.placeholder) & (torch.arange(ids.shape[1]) < prompt)
                more["mm_token_type_ids"] = types.int()
            sampled = (ids == reader.placeholder) & (torch.arange(ids.shape[1]) >= prompt)
            with embedded_by_hand(double, reader, sampled):
                hidden = double.base_model(input_ids=ids.masked_fill(sampled, 1), **more).last_hidden_state
            own = (hidden @ double.score.weight.T)[0, :, 0]
            expected[row, :length] = own[prompt - 1 : -1] if kind == "value" else own[-1]
        # rounding: transformers' own passes in float32, row by row, are up to 1.15e-5 (LLaVA) from float64
        for weights, bound in ((double, 5e-6), (model, 1.5e-5)):
            module = (ValueModel if kind == "value" else SequenceScorer)(weights, packed=True)
            module.reader = reader_for(weights, folder)
            found = module.figures(columns_of(batch, torch.arange(len(batch)), torch.device("cpu"))).double()
            found = found if kind == "value" else found[:, None].expand(-1, T)
            assert (found - expected).abs()[mask_BT].max() < bound


def checked(module: PolicyModel, dtype: torch.dtype = torch.float32) -> None:
    require_eager_figures(
        module,
        name="the actor",
        updates=True,
        dtype=dtype,
        precision=partial(
            low_precision, module.hugging_face_model, None if dtype == torch.float32 else dtype
        ),
        remedy="",
    )


def of_family(folders: Any, kind: str, packed: bool) -> PolicyModel:
    folder = folders(kind)
    module = PolicyModel(loud(load_causal_lm(folder)), packed=packed)
    module.reader = reader_for(module.hugging_face_model, folder)
    return module


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_check_accepts_every_family(folders, kind, packed):
    checked(of_family(folders, kind, packed))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_bfloat16_is_within_the_bound_of_the_check(folders, kind, packed):
    checked(of_family(folders, kind, packed), torch.bfloat16)


def drop_pixels(monkeypatch: Any) -> None:
    inputs = PictureReader.inputs

    def without(self: Any, batch: Any, computed_BL: Any = None) -> Any:
        return inputs(self, {name: batch[name] for name in batch if name != "images"}, computed_BL)

    monkeypatch.setattr(PictureReader, "inputs", without)


def take_pixels_of_another_row(monkeypatch: Any) -> None:
    pixels = PictureReader._pixels
    monkeypatch.setattr(
        PictureReader, "_pixels", lambda self, digests, device: pixels(self, _turned(digests), device)
    )
    own = PictureReader.own

    def whole(self: Any, batch: Any, ids_BL: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(PictureReader, "_pixels", pixels)
            return own(self, batch, ids_BL)

    monkeypatch.setattr(PictureReader, "own", whole)


def _turned(digests: list[int]) -> list[int]:
    """Exchange the first two, whose pictures have one size."""
    return [digests[1], digests[0], *digests[2:]] if len(digests) > 1 else digests


def leave_pictures_out_of_the_key(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        PromptsOnce,
        "of",
        classmethod(
            lambda cls, batch, with_last: cls(
                batch["attention_mask"].bool(),
                first_with_prompt({n: batch[n] for n in batch if n != "images"}),
                batch["input_ids"].shape[1] - batch["response_mask"].shape[1],
                torch.device("cpu"),
            )
        ),
    )


def count_positions_plainly(monkeypatch: Any) -> None:
    monkeypatch.setattr(PictureReader, "_positions", lambda *arguments: None)


def see_one_way(monkeypatch: Any) -> None:
    monkeypatch.setattr(PictureReader, "_groups", lambda *arguments: None)


MUTATIONS = [
    *((drop_pixels, kind) for kind in picture_models.FAMILIES),
    *((take_pixels_of_another_row, kind) for kind in picture_models.FAMILIES),
    *((leave_pictures_out_of_the_key, kind) for kind in picture_models.FAMILIES),
    (count_positions_plainly, "qwen2_5_vl"),
    (count_positions_plainly, "qwen3_vl"),
    (see_one_way, "gemma3"),
]


@pytest.mark.parametrize(
    ("mutation", "kind"),
    [pytest.param(*case, marks=() if case[1] in FAST else pytest.mark.slow) for case in MUTATIONS],
)
def test_the_check_refuses_passes_that_see_other_pictures(folders, monkeypatch, mutation, kind):
    module = of_family(folders, kind, packed=True)
    mutation(monkeypatch)
    with pytest.raises(ModelError, match="rows with pictures"):
        checked(module)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_check_of_decoding_accepts_every_family(folders, kind):
    model = loud(load_causal_lm(folders(kind)))
    HFRollout(model, pad_token_id=0, eos_token_ids=[2], reader=reader_for(model, folders(kind)))


@pytest.mark.parametrize("mutation", ["pictures", "positions"])
def test_the_check_of_decoding_refuses_other_pictures_and_positions(folders, monkeypatch, mutation):
    """Text is decoded rightly in both cases."""
    folder = folders("qwen2_5_vl")
    model = loud(load_causal_lm(folder))
    if mutation == "pictures":
        pad = Contexts.pad.__func__
        plain = classmethod(
            lambda cls, contexts, of_row, device, images=None: pad(cls, contexts, of_row, device)
        )
        monkeypatch.setattr(Contexts, "pad", plain)
    else:
        tokens = property(lambda self: self.attention_mask.sum(dim=1) - 1)
        monkeypatch.setattr(vision.PictureInputs, "last_position", tokens)
    HFRollout(model, pad_token_id=0, eos_token_ids=[2])
    with pytest.raises(ModelError, match="wrongly after pictures"):
        HFRollout(model, pad_token_id=0, eos_token_ids=[2], reader=reader_for(model, folder))


def test_a_family_whose_own_pass_fails_is_refused_by_name(folders, monkeypatch):
    module = of_family(folders, "smolvlm", packed=False)
    monkeypatch.setattr(PictureReader, "own", lambda *_: torch.zeros(2)[5])
    with pytest.raises(ModelError, match=r"the actor: SmolVLM.* fails in a trial pass .*IndexError"):
        checked(module)


def test_pixels_that_cannot_be_joined_are_refused_by_name(folders, held, monkeypatch):
    reader = reader_for(load_causal_lm(folders("llava")), folders("llava"))

    def of_its_size(_: Any, picture: Any) -> dict[str, Tensor]:
        return {"pixel_values": torch.zeros(1, 3, picture.height, picture.width)}

    monkeypatch.setattr(vision, "_recent", type(vision._recent)())
    monkeypatch.setattr(PictureReader, "_process", of_its_size)
    joined = reader._pixels([held["a"], held["b"]], torch.device("cpu"))["pixel_values"]
    assert joined.shape == (2, 3, 56, 56)
    with pytest.raises(ModelError, match=r"LlavaForConditionalGeneration: pixels .* cannot be joined"):
        reader._pixels([held["a"], held["c"]], torch.device("cpu"))


def test_a_family_that_fails_packed_is_padded(folders, monkeypatch):
    folder = folders("gemma3")
    module = PolicyModel(loud(load_causal_lm(folder)), packed="auto")
    module.reader = reader_for(module.hugging_face_model, folder)
    see_one_way(monkeypatch)
    checked(module)
    assert not module.packed


def test_pictures_that_are_seen_both_ways_need_prompts_apart(folders):
    module = of_family(folders, "gemma3", packed=True)
    module.packing = lambda batch: Packing(batch["attention_mask"].cpu(), torch.device("cpu"))
    with pytest.raises(ModelError, match="attend to each other"):
        checked(module)


def test_a_model_that_is_blind_is_refused_and_a_fresh_projector_is_told(folders, caplog):
    folder = folders("gemma3")
    module = PolicyModel(load_causal_lm(folder), packed=True)
    module.reader = reader_for(module.hugging_face_model, folder)
    checked(module)  # its projector begins with zeros
    assert "the weights of its projector are 0" in caplog.text
    blind = of_family(folders, "smolvlm", packed=True)
    with torch.no_grad():
        blind.hugging_face_model.get_parameter("model.vision_model.post_layernorm.weight").zero_()
    with pytest.raises(ModelError, match="do not see pictures"):
        checked(blind)


@pytest.mark.fast("gemma3")
@pytest.mark.parametrize("kind", FAST)
def test_checkpointing_changes_no_bit(folders, held, kind):
    folder = folders(kind)
    gradients = []
    for checkpointing in (False, True, "selective"):
        model = loud(load_causal_lm(folder))
        module = PolicyModel(model, packed=True)
        module.reader = reader_for(model, folder)
        if checkpointing:
            module.enable_gradient_checkpointing(selective=checkpointing == "selective")
            try_kept_results(module)
        module.train()
        batch = with_placeholders(samples_of(model, module.reader, held), module.reader.placeholder)
        pass_over(module, batch, len(batch), torch.ones(len(batch), T).double())
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    plain, *others = gradients
    for name, gradient in plain.items():
        assert gradient is None or all(gradient.equal(other[name]) for other in others), name


def test_processed_pictures_are_remembered_up_to_a_bound(folders, held, monkeypatch):
    folder = folders("smolvlm")
    reader = reader_for(load_causal_lm(folder), folder)
    monkeypatch.setattr(vision, "_recent", type(vision._recent)())
    calls = []
    process = PictureReader._process
    monkeypatch.setattr(
        PictureReader, "_process", lambda self, picture: calls.append(1) or process(self, picture)
    )
    for name in "abab":
        reader._processed(held[name])
    assert len(calls) == 2
    monkeypatch.setattr(vision, "PIXELS_REMEMBERED", 1)
    for name in "abab":
        reader._processed(held[name])
    assert len(vision._recent) == 1
    assert len(calls) == 2 + 3  # the first is still there


def test_a_model_of_another_placeholder_is_refused(folders, held):
    """A critic of another family would take the tokens of pictures for text."""
    model = load_causal_lm(folders("smolvlm"))
    reader = reader_for(model, folders("smolvlm"))
    columns = prompts_of(model, reader, held).batch
    reader.placeholder += 1
    with pytest.raises(ModelError, match=f"no token {reader.placeholder}"):
        reader.inputs(columns)


def test_rows_with_pictures_need_a_model_that_reads_them(folders, held):
    folder = folders("smolvlm")
    model = load_causal_lm(folder)
    batch = samples_of(model, reader_for(model, folder), held)
    with pytest.raises(ModelError, match="set_pictures"):
        PolicyModel(model, packed=True)(columns_of(batch, torch.arange(2), torch.device("cpu")))


PARTS = {
    "qwen2_5_vl": {"visual.merger": "projector", "visual.blocks": "encoder", "visual.patch_embed": "encoder"},
    "qwen3_vl": {"visual.merger": "projector", "visual.deepstack_merger_list": "projector"},
    "smolvlm": {"connector": "projector", "vision_model": "encoder"},
    "gemma3": {"multi_modal_projector": "projector", "vision_tower": "encoder"},
    "llava": {"multi_modal_projector": "projector", "vision_tower": "encoder"},
    "internvl": {"multi_modal_projector": "projector", "vision_tower": "encoder"},
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_a_model_are_frozen_by_name(folders, caplog, kind):
    model = load_causal_lm(folders(kind))
    weights = {name.removeprefix("model."): weight for name, weight in model.named_parameters()}
    of_language = {
        name for name in weights if name.startswith(("language_model.", "text_model.", "lm_head."))
    }
    with caplog.at_level("INFO"):
        vision.freeze(model, ["encoder"])
        vision.log_trained(model)
    assert "of the encoder" not in caplog.text
    assert "of the projector" in caplog.text
    for name, weight in weights.items():
        part = next((part for path, part in PARTS[kind].items() if name.startswith(f"{path}.")), None)
        if name in of_language or part == "projector":
            assert weight.requires_grad, name
        elif part == "encoder":
            assert not weight.requires_grad, name
    vision.freeze(model, ["encoder", "projector"])
    assert {name for name, weight in weights.items() if weight.requires_grad} == of_language
    vision.freeze(model, [])
    assert all(weight.requires_grad for weight in weights.values())


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *((kind, "all-linear") for kind in ("qwen2_5_vl", "smolvlm", "gemma3")),
        *((kind, ("q_proj", "v_proj")) for kind in ("smolvlm", "gemma3")),
    ],
)
def test_adapters_are_the_language_models(folders, kind, targets):
    adapted = {}
    for excluded in (None, []):
        model = load_causal_lm(folders(kind))
        names = targets if isinstance(targets, str) else [*targets]
        settings = LoraSettings(
            base="x", rank=2, alpha=4, target_modules=names, exclude_modules=excluded, seed=0, key="model"
        )
        adapters = Adapters(model, settings)
        adapted[excluded is None] = set(adapters._layers)
    of_encoder = {name for name in adapted[False] if part_of(f"{name}.weight")}
    assert of_encoder  # on request
    assert adapted[True] == adapted[False] - of_encoder


@pytest.mark.parametrize("kind", picture_models.FAMILIES)
def test_compiled_layers_are_the_language_models(folders, kind):
    model = load_causal_lm(folders(kind))
    names = {id(layer): name for name, layer in model.base_model.named_modules()}
    found = [names[id(layer)] for layer in CompiledLayers(model)._layers]
    assert len(found) == model.config.get_text_config().num_hidden_layers
    assert all(name.startswith(("language_model.", "text_model.")) for name in found)


def test_llama_4_is_its_language_model_and_takes_no_pictures():
    config = transformers.Llama4Config()
    assert policy_class(config) is transformers.AutoModelForCausalLM
    assert policy_class(transformers.Gemma3Config()) is transformers.AutoModelForImageTextToText

"""Pictures in forward passes: the arguments, positions and masks that a family takes for them.

A batch has the column ``images`` [B, I], the digests of each row's pictures (``strop.pictures``), and each
picture's placeholder repeated in its prompt, once for each of its tokens; ``images_at`` [B, T] names those
that came in turns. The family's own forward pass puts the encoder's features there. A policy can sample a
placeholder, too: that is a token like any other.

Shapes: B rows, L columns, P of them prompt, I pictures of a row, N computed tokens of a packed row.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from threading import Lock
from time import perf_counter_ns
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from strop import pictures, ranks
from strop.config.names import PIXELS_REMEMBERED, SEEN_BOTH_WAYS
from strop.errors import ModelError, raised_as
from strop.models.heads import part_of
from strop.models.inputs import Features, PassInputs, Reader
from strop.models.passes.micro_batch import on_cpu, send
from strop.models.prompts_once import prompt_width
from strop.protocol import padded_on_the_left

logger = logging.getLogger(__name__)

_BLANK = 56
"""Width and height of a blank picture, in pixels."""
_TRIAL_SIZES = ((56, 56), (56, 56), (112, 84))
"""Width and height of pictures in trial rows, in pixels."""
_TRIAL_TOKENS = 7
"""Tokens of text in trial rows, of which three are in the prompt."""
_recent: OrderedDict[tuple[str, int], dict[str, Tensor]] = OrderedDict()
_one_thread = Lock()
_work: Counter[str] = Counter()


def take_work() -> dict[str, float]:
    """Return how many pictures this process has processed since the last call, and in which time."""
    with _one_thread:
        taken = {"images/processed": float(_work["pictures"]), "timing_s/pictures": _work["ns"] / 1e9}
        _work.clear()
    return taken


@dataclass(frozen=True)
class PictureInputs(PassInputs):
    """Tokens of which some are of pictures. ``position_ids`` may have three planes [3, B, L] (M-RoPE)."""

    sampled: Tensor
    """True [B, L] or [1, N] for placeholders that were sampled, whose ``input_ids`` are another token's."""
    placeholder: int
    others: Mapping[str, Any]
    """The family's arguments for pictures: pixels and sizes, or features."""
    of_tokens: Mapping[str, Tensor]
    """Further arguments [B, L] or [1, N]."""
    add: Callable[[Tensor], Tensor] | None = None
    """Makes the embeddings that the pass goes on with from those of its tokens."""

    def packed(self, pack: Callable[[Tensor], Tensor]) -> Self:
        planes = self.position_ids
        return replace(
            self,
            input_ids=pack(self.input_ids),
            position_ids=pack(planes)
            if planes.dim() == 2
            else torch.stack([pack(plane) for plane in planes]),
            attention_mask=None,
            sampled=pack(self.sampled),
            of_tokens={name: pack(column) for name, column in self.of_tokens.items()},
        )

    @property
    def last_position(self) -> Tensor:
        largest = super().last_position
        return largest if largest.dim() == 1 else largest.amax(dim=0)

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), **self.others, **self.of_tokens}

    def around(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Embed placeholders that were sampled as themselves: the family takes their ids for pictures."""
        embeddings = model.get_input_embeddings()

        def changed(output: Tensor) -> Tensor:
            own = embeddings(torch.tensor([self.placeholder], device=output.device))
            output = torch.where(self.sampled[..., None], own, output)
            return output if self.add is None else self.add(output)

        return _once_after(embeddings, changed)


class PictureReader(Reader):
    """Make the inputs of a model that reads pictures; all of its roles and rollout ``hf`` use it."""

    def __init__(self, model: PreTrainedModel, image_processor: Any) -> None:
        """``image_processor``: the model's, of transformers; ``ModelError`` for a model of text."""
        config = model.config
        self.model, self._processor = model, image_processor
        self._settings = image_processor.to_json_string()
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if token is None or not hasattr(model.base_model, "get_image_features"):
            raise ModelError(
                f"{type(model).__name__} of {model.name_or_path} has no token that stands for a picture, and "
                "the data set has pictures; expected a model like Qwen2.5-VL, SmolVLM, LLaVA or Gemma 3"
            )
        self.placeholder: int = token
        self._other = next(token for token in range(2) if token != self.placeholder)
        # families that count the rows and columns of a picture in their positions (M-RoPE)
        self._counts_places = hasattr(model.base_model, "get_rope_index")
        self._takes_features = "mm_encoder_outputs" in inspect.signature(model.base_model.forward).parameters
        # Gemma 3: the tokens of a picture attend to each other, and the masks follow from their types
        self._sees_both_ways = SEEN_BOTH_WAYS.get(config.model_type, False)

    @property
    def is_fresh(self) -> bool:
        """True if the weights between the encoder and the language model are 0, as Gemma 3 begins."""
        weights = self.model.named_parameters()
        return any(
            part_of(name) == "projector" and weight.dim() > 1 and not weight.any() for name, weight in weights
        )

    def inputs(
        self,
        batch: Mapping[str, Tensor],
        computed_BL: Tensor | None = None,
        encoded: dict[int, Features] | None = None,
    ) -> PassInputs:
        """See ``Reader``; pictures of rows whose prompts are not among the computed tokens are left out."""
        plain = PassInputs(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
        if "images" not in batch and "images_at" not in batch:
            return plain
        device = batch["input_ids"].device
        ids_BL, mask_BL = on_cpu(batch, "input_ids"), on_cpu(batch, "attention_mask").bool()
        images_BI = on_cpu(batch, "images") if "images" in batch else ids_BL[:, :0]
        prompt_BL, at_BL = torch.arange(ids_BL.shape[1]) < _prompt_end(batch), _images_at(batch)
        marks_BL = (ids_BL == self.placeholder) & mask_BL
        of_picture_BL = marks_BL & (prompt_BL | (at_BL != 0))
        sampled_BL = marks_BL & ~of_picture_BL
        if (images_BI.any(dim=1) & mask_BL.any(dim=1) & ~of_picture_BL.any(dim=1)).any():
            raise ModelError(
                f"a prompt has pictures and no token {self.placeholder}, which stands for one in the "
                f"configuration of {type(self.model).__name__} of {self.model.name_or_path}: use models of "
                "one family in all roles, with the tokenizer and processor that belong to them"
            )
        seen_BL = mask_BL if computed_BL is None else computed_BL
        in_prompt_B1 = (of_picture_BL & seen_BL & (at_BL == 0)).any(dim=1, keepdim=True)
        digests = _digests(torch.cat([images_BI * in_prompt_B1, at_BL * seen_BL], dim=1))
        if not digests:
            return self._without_pictures(plain)
        images_BI = torch.cat([images_BI, at_BL], dim=1)
        positions = self._positions(ids_BL, mask_BL, of_picture_BL, images_BI)
        return PictureInputs(
            input_ids=send(ids_BL.masked_fill(sampled_BL, self._other), device),
            position_ids=plain.position_ids if positions is None else send(positions, device),
            attention_mask=plain.attention_mask,
            seen_together=self._groups(of_picture_BL, mask_BL),
            sampled=send(sampled_BL, device),
            placeholder=self.placeholder,
            others=self._encoded_or_pixels(digests, device, encoded),
            of_tokens={"token_type_ids": send(of_picture_BL.long(), device)} if self._sees_both_ways else {},
        )

    def own(self, batch: Mapping[str, Tensor], ids_BL: Tensor) -> dict[str, Any]:
        """See ``Reader``; the family counts positions and makes masks."""
        arguments = super().own(batch, ids_BL)
        if "images" not in batch or not (digests := _digests(on_cpu(batch, "images"))):
            return arguments
        ids_BL = ids_BL.cpu()
        prompts_B1 = on_cpu(batch, "attention_mask")[:, : prompt_width(batch)].sum(dim=1, keepdim=True)
        of_picture_BL = (ids_BL == self.placeholder) & (torch.arange(ids_BL.shape[1]) < prompts_B1)
        device = arguments["input_ids"].device
        types_BL = send(of_picture_BL.long(), device)
        if self._sees_both_ways:
            arguments["token_type_ids"] = types_BL
        if self._counts_places:
            arguments["mm_token_type_ids"] = types_BL
        return {**arguments, **self._pixels(digests, device)}

    def _positions(
        self, ids_BL: Tensor, mask_BL: Tensor, of_picture_BL: Tensor, images_BI: Tensor
    ) -> Tensor | None:
        """Return positions [3, B, L] of a family that counts the places in a picture, on the CPU."""
        if not self._counts_places:
            return None
        grid = torch.cat([self._processed(digest)["image_grid_thw"] for digest in _digests(images_BI)])
        decoder: Any = self.model.base_model
        positions, _ = decoder.get_rope_index(
            ids_BL, of_picture_BL.int(), image_grid_thw=grid, attention_mask=mask_BL.long()
        )
        return positions

    def _groups(self, of_picture_BL: Tensor, mask_BL: Tensor) -> Tensor | None:
        """Return the number [B, K] of the picture of each real token, 0 for text, if it is seen both ways."""
        if not self._sees_both_ways:
            return None
        begins_BL = of_picture_BL & ~nn.functional.pad(of_picture_BL, (1, 0))[:, :-1]
        numbers_BL = begins_BL.cumsum(dim=1) * of_picture_BL
        rows = [numbers[mask] for numbers, mask in zip(numbers_BL, mask_BL, strict=True)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _without_pictures(self, plain: PassInputs) -> PassInputs:
        """Return the inputs of a pass without a picture, beside passes on other ranks that may have some.

        FSDP2 gathers the encoder's weights in a collective: this rank encodes a blank picture too, times 0.
        """
        if not self._is_sharded:
            return plain
        return PictureInputs(
            plain.input_ids,
            plain.position_ids,
            plain.attention_mask,
            sampled=torch.zeros_like(plain.input_ids, dtype=torch.bool),
            placeholder=self.placeholder,
            others={},
            of_tokens={},
            add=self._with_blank,
        )

    def _with_blank(self, embedded: Tensor) -> Tensor:
        blank = self._process(np.zeros((_BLANK, _BLANK, 3), dtype=np.uint8))
        pixels = {name: send(column, embedded.device) for name, column in blank.items()}
        return embedded + 0.0 * sum(part.sum() for part in chain(*self._features(pixels)))

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self.model.modules())

    def _encoded_or_pixels(
        self, digests: Sequence[int], device: torch.device, encoded: dict[int, Features] | None
    ) -> dict[str, Any]:
        """Return the family's arguments for pictures: features where one stands in several rows.

        Pixels for a sharded model, whose weights are gathered in the family's own pass.
        """
        if encoded is None and len(set(digests)) < len(digests):
            encoded = {}
        if encoded is None or not self._takes_features or self._is_sharded:
            return self._pixels(digests, device)
        if new := [digest for digest in dict.fromkeys(digests) if digest not in encoded]:
            encoded.update(zip(new, self._encode(new, device), strict=True))
        layers: list[Any] = [*map(_joined, zip(*(encoded[digest] for digest in digests), strict=True))]
        found: Any = BaseModelOutputWithPooling(pooler_output=layers[0])
        found.deepstack_features = layers[1:]
        return {"mm_encoder_outputs": {"image": found}}

    def _encode(self, digests: Sequence[int], device: torch.device) -> list[Features]:
        layers, counts = self._features(self._pixels(digests, device)), [1] * len(digests)
        if len(layers[0]) != len(digests):  # one for each tile or crop
            pixels = map(self._processed, digests)
            counts = [columns["pixel_values"].shape[_axis(columns)] for columns in pixels]
        spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        return [[layer[span] for layer in layers] for span in spans]

    def _features(self, pixels: Mapping[str, Tensor]) -> Features:
        """Return the features of pictures, then those of layers inside the encoder (Qwen3-VL)."""
        decoder: Any = self.model.base_model
        found = decoder.get_image_features(**pixels, return_dict=True)
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]

    @torch.no_grad()
    def trial_rows(self) -> dict[str, Tensor]:
        """Return rows of random tokens and pictures in the layout of rollouts, the same on every rank.

        The first two differ in their pictures alone; the third has two, the last none. Collective if the
        model is sharded.
        """
        device, random = self.model.device, np.random.default_rng(0)
        held = [pictures.hold(_noise(random, *size), "a trial picture") for size in _TRIAL_SIZES]
        of_row = ([0], [1], [2, 0], [])
        marks = [[self.placeholder] * count for count in self._counts(held)]
        text = random.integers(self.model.config.get_text_config().vocab_size, size=_TRIAL_TOKENS)
        text = np.where(text == self.placeholder, self._other, text).tolist()
        # a token before, between and behind pictures
        prompts = [[text[0], *(i for n in row for i in (*marks[n], text[1])), text[2]] for row in of_row]
        response = text[3:]
        sequences = [prompt + response for prompt in prompts]
        images = [[held[number] for number in row] for row in of_row]
        responses_BT = torch.tensor([response] * len(of_row))
        columns = {
            **padded_on_the_left(sequences),
            "responses": responses_BT,
            "response_mask": torch.ones(responses_BT.shape),
            "images": torch.tensor([row + [0] * (2 - len(row)) for row in images]),
        }
        return {name: column.to(device) for name, column in columns.items()}

    def trial_prompts(self) -> dict[str, Tensor]:
        """Return two prompts of ``trial_rows``: one with two pictures, and one with none."""
        rows = self.trial_rows()
        width = prompt_width(rows)
        columns = {name: rows[name][2:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
        return {name: column.cpu() for name, column in {**columns, "images": rows["images"][2:]}.items()}

    def _counts(self, digests: Sequence[int]) -> list[int]:
        """Return the number of tokens of each picture."""
        counts = []

        def count(embedded: Tensor) -> Tensor:
            for digest in digests:
                features, *_ = self._features(self._pixels([digest], embedded.device))
                counts.append(sum(map(len, features)))
            return embedded

        # in a pass, where the weights of a sharded model are gathered
        with _once_after(self.model.get_input_embeddings(), count):
            ids = torch.tensor([[self._other]], device=self.model.device)
            self.model.base_model(input_ids=ids, use_cache=False)
        return counts

    def _pixels(self, digests: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Return the family's arguments for pictures in the order of their tokens."""
        parts = [self._processed(digest) for digest in digests]
        axis = _axis(parts[0])
        with raised_as(ModelError, f"{type(self.model).__name__}: pixels of pictures cannot be joined"):
            columns = {name: torch.cat([part[name] for part in parts], dim=axis) for name in parts[0]}
        return {name: send(column, device) for name, column in columns.items()}

    def _processed(self, digest: int) -> dict[str, Tensor]:
        """Return the image processor's tensors of one picture, on the CPU."""
        key = self._settings, digest
        with _one_thread:
            found = _recent.pop(key, None)
        is_known, start = found is not None, perf_counter_ns()
        if found is None:
            found = self._process(pictures.opened(digest))
        with _one_thread:
            if not is_known:
                _work.update(pictures=1, ns=perf_counter_ns() - start)
            _recent[key] = found
            total = sum(column.nbytes for columns in _recent.values() for column in columns.values())
            while total > PIXELS_REMEMBERED and len(_recent) > 1:
                _, dropped = _recent.popitem(last=False)
                total -= sum(column.nbytes for column in dropped.values())
        return found

    def _process(self, picture: Any) -> dict[str, Tensor]:
        made = self._processor([[picture]], return_tensors="pt")
        return {name: made[name] for name in self._processor.model_input_names if name in made}


def freeze(model: PreTrainedModel, parts: Collection[str]) -> None:
    """Keep the weights of ``parts``; ``ModelError`` for a model without such a part."""
    missing = set(parts)
    for name, weight in model.named_parameters():
        missing.discard(part := part_of(name) or "language model")
        weight.requires_grad_(part not in parts)
    if missing:
        raise ModelError(
            f"model.freeze={list(parts)}: {type(model).__name__} has no {min(missing)}; set it to []"
        )


def log_trained(model: PreTrainedModel) -> None:
    """Log how many weights of which part are trained, those of LoRA adapters among them."""
    counts: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        counts[part_of(name) or "language model"] += weight.numel() * weight.requires_grad
    if ranks.is_first():
        trained = (f"{count:,} of the {part}" for part, count in counts.items() if count)
        logger.info("weights that are trained: %s", ", ".join(trained))


def reader_of(model: PreTrainedModel, image_processor: Any | None) -> Reader:
    """Return the reader of a model, which reads pictures if there is an image processor."""
    return Reader() if image_processor is None else PictureReader(model, image_processor)


def _prompt_end(batch: Mapping[str, Tensor]) -> Tensor | int:
    """Return the column behind the prompts; [B, 1] of contexts that go on with sampled tokens."""
    if "continued" in batch:
        return batch["input_ids"].shape[1] - on_cpu(batch, "continued")[:, None]
    return prompt_width(batch) if "response_mask" in batch else batch["input_ids"].shape[1]


def _images_at(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the column of pictures that came in turns, in all columns [B, L]."""
    length = batch["input_ids"].shape[1]
    if "images_at" not in batch:
        return torch.zeros_like(on_cpu(batch, "input_ids"))
    at_BT = on_cpu(batch, "images_at")
    return nn.functional.pad(at_BT, (length - at_BT.shape[1], 0))


def _noise(random: np.random.Generator, width: int, height: int) -> bytes:
    """Return the file of a picture of random colours."""
    pixels = random.integers(256, size=(height, width, 3), dtype=np.uint8)
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()


def _axis(pixels: Mapping[str, Tensor]) -> int:
    """Return the dimension of pictures, tiles, patches, or crops: [1, crops, ...] of Idefics 3, SmolVLM."""
    return int(pixels["pixel_values"].dim() == 5 and "pixel_attention_mask" in pixels)


def _joined(parts: Sequence[Tensor | Sequence[Tensor]]) -> Tensor | list[Tensor]:
    """Return the features of several pictures as the encoder returns them."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(tensors) if tensors else [*chain(*parts)]


def _digests(images_BI: Tensor) -> list[int]:
    return images_BI[images_BI > 0].tolist()


@contextmanager
def _once_after(module: nn.Module, changed: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Replace the output of the module's first pass in the body by what ``changed`` makes of it."""

    def replaced(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        del module, inputs
        hook.remove()
        return changed(output)

    hook = module.register_forward_hook(replaced)
    try:
        yield
    finally:
        hook.remove()

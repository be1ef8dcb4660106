"""The text that stands for a picture in a prompt, by the model's own processor."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strop import pictures
from strop.config.names import SEEN_BOTH_WAYS
from strop.data.fetch import progress_bar
from strop.data.pictures.parts import Expansion, Shown
from strop.errors import DataError, ModelError, raised_as

if TYPE_CHECKING:
    from strop.config.memory.shapes import PictureBytes

_TRIAL_SIZES = ((56, 56), (112, 84))
"""Width and height of blank pictures that try an image processor, in pixels."""


class PromptPictures:
    """Pictures of prompts as text; the text of each depends on its size alone.

    ``images`` are the digests of each row of a data set, ``columns`` the same as an array [rows, I], 0 behind
    the last of a row.
    """

    def __init__(
        self, processor: Any, images: Sequence[Sequence[int]] = (), columns: np.ndarray | None = None
    ) -> None:
        self.processor, self.images = processor, images
        self.columns = np.zeros((0, 0), dtype=np.int64) if columns is None else columns
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder:
            raise ModelError(f"{type(processor).__name__} has no token for pictures; it is not supported")
        tokenizer = processor.tokenizer
        self.mark: int = tokenizer.convert_tokens_to_ids(self.placeholder)
        # Gemma's placeholder begins a picture, and another token stands for its features
        self._feature: str = getattr(tokenizer, "image_token", None) or self.placeholder
        self._marks = {self.mark, tokenizer.convert_tokens_to_ids(self._feature)}
        self._texts: dict[tuple[int, int], str] = {}
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}
        self._tokens: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}

    def expansions(self, start: int, stop: int) -> list[Expansion]:
        """Return those of rows ``start`` to ``stop``; the processor runs once for each size of picture."""
        return [*map(self.expansion, self.images[start:stop])]

    def expansion(self, digests: Sequence[int]) -> Expansion:
        """Return that of pictures by their digests."""
        return Expansion(self.placeholder, tuple(map(self._text_of, digests)))

    def tokens(self, digest: int) -> int:
        """Return the number of placeholders of a picture, in whose places its features stand."""
        return self._counts_of(digest)[0]

    def tokens_of_rows(self) -> np.ndarray:
        """Return the placeholders of each row's pictures, int64 [rows]."""
        return np.array([sum(map(self.tokens, row)) for row in self.images], dtype=np.int64)

    def pixels(self, digest: int) -> int:
        """Return the number of float32 values that the processor makes of a picture."""
        return self._counts_of(digest)[1]

    def counts(self) -> np.ndarray:
        """Return width, height, ``tokens`` and ``pixels`` of each size of picture, int64 [S, 4]."""
        each = {pictures.size(digest): digest for row in self.images for digest in row}
        found = [(*size, *self._counts_of(digest)) for size, digest in sorted(each.items())]
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def recall(self, counts: np.ndarray) -> None:
        """Take what ``counts`` returned, for which the processor would run again."""
        self._counts |= {(width, height): (n, size) for width, height, n, size in counts.tolist()}

    def memory(self) -> PictureBytes:
        """Return the bytes of the pictures and of their processed pixels."""
        from strop.config.memory.shapes import FLOAT32, PictureBytes  # imports pydantic

        each = dict.fromkeys(digest for row in self.images for digest in row)
        files = (picture.file for picture in pictures.files(each).values())
        return PictureBytes(
            FLOAT32 * max(sum(map(self.pixels, row)) for row in self.images),
            FLOAT32 * sum(map(self.pixels, each)),
            sum(len(file) for file in files if isinstance(file, bytes)),
        )

    def damaged(self) -> Iterator[str]:
        """Decode all pictures; yield an error for each that cannot be decoded."""
        digests = dict.fromkeys(digest for row in self.images for digest in row)
        with progress_bar("decoding pictures", len(digests)) as advance:
            for digest in digests:
                try:
                    pictures.opened(digest)
                except DataError as error:
                    yield str(error)
                advance(1)

    def __str__(self) -> str:
        """Return the number of pictures, their tokens and their processor in words."""
        rows, counts = [len(row) for row in self.images], self.counts()
        least, most = counts[counts[:, 2].argmin()], counts[counts[:, 2].argmax()]
        tokens = " to ".join(f"{n:,} ({width} x {height})" for width, height, n, _ in (least, most))
        tokens = tokens if least[2] != most[2] else f"{most[2]:,}"
        kinds = type(self.processor).__name__, type(self.processor.image_processor).__name__
        return (
            f"{sum(rows):,} in {np.count_nonzero(rows):,} of {len(rows):,} rows, at most {max(rows)} in one; "
            f"{tokens} tokens each; {', '.join(kinds)}"
        )

    def in_words(self, prompt: str, digests: Sequence[int]) -> str:
        """Return a prompt's text with words, ``[picture 1: ...]``, in place of each picture's placeholders.

        One whose text has further placeholders, which a user wrote, is returned as it is.
        """
        token = self._feature if self._feature in prompt else self.placeholder
        pieces, counts = prompt.split(token), [self.tokens(digest) for digest in digests]
        if len(pieces) != sum(counts) + 1:
            return prompt
        found, last = pieces[0], 0
        for number, (digest, count) in enumerate(zip(digests, counts, strict=True), start=1):
            last += count  # texts between its own placeholders stand for rows and crops
            found += f"[picture {number}: {pictures.in_words(digest)}, {count} tokens]{pieces[last]}"
        return found

    def digest(self) -> str:
        """Return a digest of the pictures of all rows and of what makes tokens and pixels of them.

        It begins with the name of the processor's back-end, whose pixels differ.
        """
        settings = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        whole = hashlib.sha256(f"{settings} {[list(row) for row in self.images]}".encode()).hexdigest()
        return f"{type(self.processor.image_processor).__name__} {whole[:16]}"

    def check(self, digests: Sequence[int], where: str) -> None:
        """Raise :class:`DataError` for a picture that cannot be decoded.

        Raises :class:`ModelError` if one has other tokens than a blank picture of its size.
        """
        for digest in digests:
            if self._text(pictures.opened(digest)) != self._text_of(digest):
                raise ModelError(
                    f"{where}: {type(self.processor).__name__} writes a text for the picture that does not "
                    "follow from its size; pictures of this family are not supported"
                )

    def images_at(self, ids: Sequence[int], digests: Sequence[int]) -> list[int]:
        """Return the column ``images_at`` of ids that a chat template wrote, with these pictures in order.

        Raises ``ValueError`` if the tokens of a picture are not found.
        """
        found, ids, end = [0] * len(ids), list(ids), 0
        for digest in digests:
            # Gemma's line ends around a picture's own tokens merge with those of a text, or of another one
            before, own, after = self._tokens_of(digest)
            starts = (place for place in range(end, len(ids)) if ids[place] == own[0])
            start = next((place for place in starts if ids[place : place + len(own)] == own), -1)
            if start < 0:
                raise ValueError("the tokens of a picture are not in the prompt")
            end = start + len(own)
            start -= len(before) if ids[max(start - len(before), 0) : start] == before else 0
            end += len(after) if ids[end : end + len(after)] == after else 0
            found[start:end] = [digest, *[-1] * (end - start - 1)]
        return found

    def shown(self, ids: Sequence[int], digests: Sequence[int]) -> Shown:
        """Return ids that a chat template wrote with their pictures."""
        return Shown(list(ids), tuple(self.images_at(ids, digests)) if digests else ())

    def unexpanded(self, ids: Sequence[int], images_at: Sequence[int]) -> list[int]:
        """Return token ids with one placeholder for each picture, as vLLM takes them."""
        pairs = zip(ids, images_at, strict=True)
        return [self.mark if digest else token for token, digest in pairs if digest >= 0]

    def _tokens_of(self, digest: int) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens of a picture from its first placeholder to its last, and those around them."""
        size = pictures.size(digest)
        if size not in self._tokens:
            ids = self.processor.tokenizer(self._text_of(digest), add_special_tokens=False)["input_ids"]
            own = [place for place, token in enumerate(ids) if token in self._marks]
            first, end = own[0], own[-1] + 1
            self._tokens[size] = ids[:first], ids[first:end], ids[end:]
        return self._tokens[size]

    def _counts_of(self, digest: int) -> tuple[int, int]:
        if (size := pictures.size(digest)) not in self._counts:
            self._text_of(digest)
        return self._counts[size]

    def _text_of(self, digest: int) -> str:
        from PIL import Image

        size = pictures.size(digest)
        if size not in self._texts:
            # half the time of a large picture's, and the same text
            self._texts[size] = self._text(Image.new("RGB", size), do_rescale=False, do_normalize=False)
        return self._texts[size]

    def _text(self, picture: Any, **options: bool) -> str:
        kind = type(self.processor).__name__
        with raised_as(ModelError, f"{kind} cannot process a picture of {picture.width} x {picture.height}"):
            options["return_text_replacement_offsets"] = True
            found = self.processor(images=[picture], text=[self.placeholder], **options)
        if not (offsets := found.get("text_replacement_offsets")):
            raise ModelError(f"{kind} does not write the tokens of a picture; this family is not supported")
        text = offsets[0][0]["replacement"]
        count = text.count(self._feature) or text.count(self.placeholder)
        self._counts[picture.size] = count, _size(found["pixel_values"])
        return text


def _size(values: Any) -> int:
    """Return the number of values in lists of arrays."""
    return sum(map(_size, values)) if isinstance(values, list) else math.prod(values.shape)


def load_image_processor(
    path: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> Any:
    """Return the part of a model's processor that makes pixels; see ``load_processor``.

    It makes those of a call of the whole processor, whose defaults replace the values of its own file
    (``crop_to_patches=True`` of InternVL). Raises :class:`ModelError` for a family whose pictures would be
    seen one way only, or are padded to each other.
    """
    from transformers import AutoImageProcessor

    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    with raised_as(ModelError, f"{path}: no processor of pictures can be loaded"):
        kind = _processor_class(path)
        defaults = {} if kind is None else kind.valid_processor_kwargs._defaults.get("images_kwargs", {})
        images = AutoImageProcessor.from_pretrained(path, **{**bounds, **defaults})
    if lacking := bounds.keys() - images.valid_kwargs.__annotations__.keys():
        raise DataError(
            f"data.{min(lacking)}: {type(images).__name__} of {path} has no bound of pixels, it resizes to "
            f"{images.size}; leave the key null"
        )
    patch, merged = getattr(images, "patch_size", None), getattr(images, "merge_size", 1)
    least = (patch * merged) ** 2 if isinstance(patch, int) else 1
    if max_pixels is not None and max_pixels < max(least, min_pixels or 0):
        limit = f"data.min_pixels={min_pixels}" if (min_pixels or 0) > least else f"the {least} of one token"
        raise DataError(f"data.max_pixels={max_pixels} is less than {limit} of {type(images).__name__}")
    with raised_as(ModelError, f"{path}: {type(images).__name__} cannot process a blank picture"):
        _require_joinable(images, path)
    return images


def _require_joinable(images: Any, path: str | Path) -> None:
    """Raise :class:`ModelError` if the pixels of several pictures can only be joined with padding.

    Those of Mistral 3 have another size each, those of LLaVA-NeXT are [1, tiles, 3, h, w], with as many tiles
    for all small pictures. Idefics 3 has [1, crops, 3, h, w], with a mask, of all pictures of a row.
    """
    from PIL import Image

    kind = "np" if uses_pillow(type(images).__name__) else "pt"  # this process may leave out torch
    made = [images([[Image.new("RGB", size)]], return_tensors=kind) for size in _TRIAL_SIZES]
    shapes = [tuple(one["pixel_values"].shape) for one in made]
    axis = int(len(shapes[0]) == 5 and "pixel_attention_mask" in made[0])
    others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if len(others) > 1 or (len(shapes[0]) == 5 and not axis):
        raise ModelError(
            f"{path}: pictures of this family are not supported: {type(images).__name__} makes pixels of the "
            f"shapes {shapes} for two pictures, and those of several can only be joined with padding"
        )


def uses_pillow(image_processor: str) -> bool:
    """Return True for the name of a class of transformers that uses Pillow; the others use torchvision.

    The two make other pixels of a picture.
    """
    return image_processor.endswith("Pil")


def load_processor(
    path: str | Path, tokenizer: Any, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> Any | None:
    """Return a model's processor without its part for videos; None for a model of text alone.

    That part needs torchvision (and num2words for SmolVLM). ``min_pixels`` and ``max_pixels`` replace the
    bounds to which pictures are resized. Raises :class:`ModelError` for a folder that lacks the files of a
    processor and for one that needs further parts (for sound), and :class:`DataError` for bounds that the
    family does not have.
    """
    from transformers import ProcessorMixin

    with raised_as(ModelError, f"{path}: no processor of pictures can be loaded"):
        kind: Any = _processor_class(path)
        parts = kind.get_attributes() if kind is not None else ()
        if "image_processor" not in parts:
            return None
        settings, _ = ProcessorMixin.get_processor_dict(str(path))
    images = load_image_processor(path, min_pixels=min_pixels, max_pixels=max_pixels)
    module: Any = importlib.import_module(kind.__module__)
    if getattr(module, "num2words", 0) is None:
        module.num2words = str
    own = {"get_attributes": classmethod(lambda _: [name for name in parts if name != "video_processor"])}
    given = {"image_processor": images, "tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    if "video_processor" in parts:
        given["video_processor"] = None
    taken = ("processor_class", "auto_map", "chat_template", *parts)
    options = {name: value for name, value in settings.items() if name not in taken}
    what = f"{path}: {kind.__name__} cannot be built from a tokenizer and an image processor"
    with raised_as(ModelError, what, remedy="pictures of this family are not supported"):
        return type(kind.__name__, (kind,), own)(**given, **options)


def _processor_class(path: str | Path) -> Any | None:
    """Return the class of a model's processor, if its family has one.

    Raises :class:`ModelError` for a family whose pictures would be seen one way only.
    """
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(path)
    if not SEEN_BOTH_WAYS.get(config.model_type, True):
        able = ", ".join(name for name, is_able in SEEN_BOTH_WAYS.items() if is_able)
        raise ModelError(
            f"{path}: pictures of {config.model_type} are not supported: their tokens may attend to each "
            f"other, which passes compute for {able} alone; use another model, or rows without pictures"
        )
    return PROCESSOR_MAPPING.get(type(config), None)

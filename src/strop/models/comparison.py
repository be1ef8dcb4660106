"""Comparison of a role's passes with its family's eager forward pass, on a few tokens at start-up.

transformers' attention back-ends ignore what they do not support (``sdpa`` a soft cap), and families draw
random numbers in training mode under names of their own. Neither raises, and the sampler does neither, so a
policy would train on log-probs of another model. The reference runs on the same module, one small forward
pass: no second copy of the weights.

Shapes: B rows, P prompt tokens, T response tokens, L = P + T.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop import ranks
from strop.errors import ModelError
from strop.models.attention import attention_set_to
from strop.models.base import RoleModel
from strop.models.heads import model_errors, require_numbers
from strop.models.packing import PackingError
from strop.models.transformers_private import attention_is_replaceable, attention_name
from strop.models.vision import PictureReader
from strop.protocol import sequence_columns

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of a log-prob, value or score in float32, where rounding gives about 1e-5."""
_NOISE = 3
"""Bound of the median difference in 16 bits, in units of the change (root mean square) by one rounding of the
embeddings.

In random models of 2 to 32 layers of Qwen 2, Qwen 3, Llama, Gemma 2 and Mixtral ``sdpa`` differed from
``eager`` by 0.1 to 0.9 of it (root mean square), and either from float32 by about as much. The median,
because a rounding may send a few tokens to other experts."""
_SEEN = 1e-6
"""Least change of a figure by another picture, in models with random weights about 0.3."""
_ROWS = ((5, 6), (5, 3), (2, 4), (7, 1))
"""Tokens of prompt and response; the first two rows share a prompt."""


def require_eager_figures(
    module: RoleModel,
    *,
    name: str,
    updates: bool,
    dtype: torch.dtype,
    precision: Callable[[], AbstractContextManager[None]] = nullcontext,
    remedy: str,
    sharded: bool = False,
) -> None:
    """Raise ``ModelError`` if passes fail, or differ from the family's eager one by more than the tolerance.

    Compared are rows of text and, if the module reads pictures, rows with some, which must matter to it; in
    eval mode and, with ``updates``, in training mode with gradients, padded or packed and with checkpointing
    as ``module`` is set up. Passes run under ``precision``, which computes in ``dtype``. Where the family's
    attention cannot be replaced, the reference is its forward pass as loaded. Collective if the module is
    ``sharded``.

    Args:
        name: the role, for errors.
        remedy: the configuration key that selects the attention back-end, for errors; may be empty.
    """
    model = module.hugging_face_model
    compare = partial(
        _compare,
        module,
        name=name,
        updates=updates,
        dtype=dtype,
        precision=precision,
        remedy=remedy,
        sharded=sharded,
    )
    with model_errors(model, f"{name}: "):
        compare(few_rows(model.config.get_text_config().vocab_size, model.device), kind="rows")
        if isinstance(module.reader, PictureReader):
            batch = module.reader.trial_rows()
            expected = chosen_figures(compare(batch, kind="rows with pictures"), batch)
            _require_sight(module.reader, expected.view(len(batch["images"]), -1), name)


def try_kept_results(module: RoleModel) -> None:
    """Run the trial pass of selective checkpointing; collective if the module is sharded."""
    if module.kept_results is None:
        return
    kept, model, was_training = module.kept_results, module.hugging_face_model, module.training

    def passed(batch: Mapping[str, Tensor]) -> None:
        with kept.trial(), torch.enable_grad():
            module.figures(batch)

    module.train()
    passed(few_rows(model.config.get_text_config().vocab_size, model.device))
    if isinstance(module.reader, PictureReader):
        passed(module.reader.trial_rows())  # after a pass, which has gathered the weights of the root
    module.train(was_training)


def _require_sight(reader: PictureReader, figures: Tensor, name: str) -> None:
    """Raise ``ModelError`` if the first two rows have equal figures: they differ in their pictures alone."""
    if (figures[0] - figures[1]).abs().max() > _SEEN:
        return
    found = f"{name}: another picture does not change what {type(reader.model).__name__} computes"
    if not reader.is_fresh:
        raise ModelError(f"{found}: its passes do not see pictures, and this family cannot be used with them")
    if ranks.is_first():
        logger.warning("%s: the weights of its projector are 0, as in a model that was not trained", found)


def _compare(
    module: RoleModel,
    batch: Mapping[str, Tensor],
    *,
    kind: str,
    name: str,
    updates: bool,
    dtype: torch.dtype,
    precision: Callable[[], AbstractContextManager[None]],
    remedy: str,
    sharded: bool,
) -> Tensor:
    """Compare on the rows of ``batch``; return the figures by the family's forward pass."""
    model = module.hugging_face_model
    implementation = attention_name(model.config)
    replaceable = attention_is_replaceable(model)
    was_training = module.training
    with precision():
        module.eval()
        attention = attention_set_to(model, "eager") if replaceable else nullcontext()
        with torch.no_grad(), attention:
            expected = module.own_figures(batch)
            require_numbers(model, expected)
            bound = TOLERANCE
            if dtype != torch.float32:
                # half of eps: the largest relative error of rounding to nearest
                with _embeddings_rounded(model, torch.finfo(dtype).eps / 2):
                    noise = _differences(module.own_figures(batch), expected, batch)
                bound += _NOISE * float(noise.square().mean().sqrt())
        modes = {"in eval mode": False} | ({"in the mode of the update": True} if updates else {})

        def errors() -> dict[str, float]:
            found = {}
            for mode, training in modes.items():
                module.train(training)
                try:
                    with torch.set_grad_enabled(training):
                        figures = module.figures(batch).detach()
                except PackingError as error:
                    if not module.pad(error):
                        raise
                    return errors()
                difference = _differences(figures, expected, batch).abs()
                error = float(difference.max() if dtype == torch.float32 else difference.median())
                excess = 0.0 if error <= bound else error
                if sharded:  # near the bound ranks differ, but all must run the same passes
                    excess = ranks.largest(excess, model.device)
                if excess:
                    found[mode] = excess
            return found

        wrong, helps = errors(), False
        reason = "packed passes differ from the family's own by {:.2g}"
        if wrong and module.pad(reason.format(max(wrong.values()))):
            wrong = errors()
        if wrong and implementation != "eager" and replaceable:
            with attention_set_to(model, "eager"):
                helps = not errors()
        setting = f"{remedy}=eager" if helps and remedy else ""
    module.train(was_training)
    if wrong:
        passes = "packed" if module.packed else "padded"
        reference = "attn_implementation=eager" if replaceable else "its own forward pass"
        sizes = " and ".join(f"by {difference:.2g} {mode}" for mode, difference in wrong.items())
        raise ModelError(
            f"{name}: the {passes} passes of {type(model).__name__} with attn_implementation="
            f"{implementation} differ from {reference} on {kind} without padding {sizes}, expected at most "
            f"{bound:.2g}; {_advice(module, wrong, setting)}"
        )
    return expected


def _advice(module: RoleModel, wrong: Mapping[str, float], setting: str) -> str:
    if setting:
        return f"set {setting}"
    if module.packed:
        return f"set {module.packing_key}=False"
    reason = "depend on padding" if "in eval mode" in wrong else "draw random numbers in training"
    return f"this family cannot be used: its passes {reason}"


def _differences(figures: Tensor, expected: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    same = figures == expected  # infinite ones too: some families forbid spare ids
    return chosen_figures((figures - expected).masked_fill(same, 0), batch)


def chosen_figures(figures: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the figures of response tokens, or of rows."""
    return figures[batch["response_mask"].bool()] if figures.dim() == 2 else figures


def few_rows(vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    """Return rows of random tokens in the layout of rollouts, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (torch.tensor(lengths)[:, None] for lengths in zip(*_ROWS, strict=True))
    width, steps = int(prompts.max()), int(responses.max())
    mask_BP, mask_BT = torch.arange(width) >= width - prompts, torch.arange(steps) < responses
    # drawn on the CPU: generators of other devices give other numbers
    ids_BL = torch.randint(vocabulary, (len(_ROWS), width + steps), generator=generator)
    ids_BL[1, :width] = ids_BL[0, :width]
    mask_BL = torch.cat([mask_BP, mask_BT], dim=1).long()
    ids_BL = ids_BL * mask_BL
    columns = {
        **sequence_columns(ids_BL, mask_BL),
        "responses": ids_BL[:, width:],
        "response_mask": mask_BT.float(),
    }
    return {name: column.to(device) for name, column in columns.items()}


@contextmanager
def _embeddings_rounded(model: PreTrainedModel, eps: float) -> Generator[None]:
    """Scale every number of the token embeddings by 1 + eps or 1 - eps in the body, at random.

    The change of the outputs shows how much a rounding matters to this model.
    """

    def scale(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + eps * signs)

    hook = model.get_input_embeddings().register_forward_hook(scale)
    try:
        yield
    finally:
        hook.remove()

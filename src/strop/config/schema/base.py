"""What every section of the configuration shares: the base class and the kinds of numbers.

A section has no defaults: `ppo_trainer.yaml` is their only source, so the two cannot drift apart.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Expected(str):
    """Metadata on a type: the words that an error and the reference page use for it."""

    __slots__ = ()


class Section(BaseModel):
    """One part of the configuration tree: typed, read-only, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # trainer.experiment_name=7 is a name
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python counts True as 1; nobody who writes total_epochs=True means that
        raise ValueError("a truth value is not a number")
    return value


def _positive_or_minus_one(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("-1 or at least 1")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Integer = Annotated[int, BeforeValidator(_not_a_bool)]
Number = Annotated[float, BeforeValidator(_not_a_bool)]

PositiveInt = Annotated[Integer, Field(gt=0)]
Count = Annotated[Integer, Field(ge=0)]
TopK = Annotated[Integer, Field(ge=-1), Expected("int >= -1 (-1 and 0: off)")]
PositiveOrAll = Annotated[Integer, AfterValidator(_positive_or_minus_one), Expected("int > 0, or -1")]
Every = Annotated[PositiveOrAll, Expected("int > 0, or -1 for never")]

PositiveFloat = Annotated[Number, Field(gt=0)]
NonNegativeFloat = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Probability = Annotated[Number, Field(gt=0, le=1)]

Names = Annotated[list[str], BeforeValidator(_one_or_many), Expected("string or list of strings")]

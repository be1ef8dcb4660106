"""Building blocks of the schemas: the base class, markers on fields, number types, shared sections.

A section has no defaults: the YAML files are their only source, so the two cannot drift apart. Keys of a
back-end may have theirs in its module ``keys`` instead (``Tree.defaults``).

A key that has an effect only sometimes says so on its field: ``Annotated[type, no_effect(...)]``, with the
condition and the reason. ``config.checks.keys`` reports such keys where somebody wrote them, and
``strop docs config`` lists them. A marker on a field that holds a section covers every key below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from strop.config.backends import ABILITIES, ENGINES, ROLLOUTS, EngineKind


class Expected(str):
    """Metadata on a type: the words that an error and the reference page use for it."""

    __slots__ = ()


@dataclass(frozen=True)
class At:
    """A key of a configuration, as the condition of a marker sees it."""

    path: str
    value: Any
    section: Any
    """The section that holds the key, for conditions on its neighbours."""
    config: Any
    """The whole tree. Untyped: the root is defined above this module."""
    one_rank: bool
    """Every role has one process, so nothing is sharded."""
    on_ray: bool
    """Workers run in separate processes."""
    on_cpu: bool


@dataclass(frozen=True)
class Limit:
    """Marker on a field: where ``applies``, the key has no effect (warning) or cannot be used (error)."""

    when: str
    """The condition in words."""
    applies: Callable[[At], bool]
    reason: str
    """Empty where the condition says it all."""
    level: Literal["warning", "error"]

    def words(self, path: str, at: At | None = None) -> tuple[str, str]:
        """Return condition and reason for the key ``path``, in a run or (None) for the reference page."""
        return self.when, self.reason

    def refusal(self, at: At) -> str:
        """Return why the key's value is refused."""
        return self.reason


def no_effect(when: str, applies: Callable[[At], bool], reason: str = "") -> Limit:
    """Mark a key that does nothing where ``applies``; it is reported only if somebody wrote it."""
    return Limit(when, applies, reason, "warning")


def refused(when: str, applies: Callable[[At], bool], reason: str) -> Limit:
    """Mark a key whose value stops the run where ``applies``, whoever wrote it."""
    return Limit(when, applies, reason, "error")


@dataclass(frozen=True)
class Required:
    """Marker on a field without a usable default: an empty value is an error where ``applies``."""

    what: str
    example: str
    applies: Callable[[At], bool] = lambda at: True
    when: str = ""

    @property
    def is_usual(self) -> bool:
        """True unless the value is needed with another key only."""
        return not self.when.startswith("with ")


class Resumes(str):
    """Marker on a field: what a resume requires of the key's value.

    A section says it for those of its fields that do not: ``class DataConfig(Section, resumes=SAME)``.
    """

    __slots__ = ()


SAME_MODEL = Resumes("same model")
"""The value of the checkpoint, also in a run that only validates."""
SAME = Resumes("same")
"""The value of the checkpoint, unless the run only validates."""
SAME_AHEAD = Resumes("same ahead")
"""The same where generation runs ahead by two iterations or more; any value elsewhere."""
MAY_CHANGE = Resumes("may change")
"""Any; a change is logged."""
NOT_COMPARED = Resumes("not compared")
"""Any: the key says where a run is, and whether it resumes."""


@dataclass(frozen=True)
class NamesFiles:
    """Marker on a field whose value names files or folders: equal contents are the same value."""


FILES = NamesFiles()


def _check_text(value: Any) -> None:
    """Raise for a text, at any depth, that no file, process or tracker can take."""
    if isinstance(value, str) and ("\0" in value or not value.isascii()):
        try:
            unusable = "\0" in value or value.encode() is None
        except UnicodeEncodeError:
            unusable = True
        if unusable:
            raise PydanticCustomError("text", "without null bytes, in UTF-8")
    for item in value if isinstance(value, list | tuple) else ():
        _check_text(item)
    for item in [*value, *value.values()] if isinstance(value, dict) else ():
        _check_text(item)


class Section(BaseModel):
    """One part of the configuration tree: typed, read-only, and closed to unknown keys."""

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # trainer.experiment_name=7 is a name
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    resumes: ClassVar[Resumes | None] = None
    """Requirement of a resume on fields without a marker."""

    def __init_subclass__(cls, *, resumes: Resumes | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if resumes is not None:
            cls.resumes = resumes

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key of this section, or ``default`` if it has no such key, as a dict does."""
        return getattr(self, name) if name in type(self).model_fields else default

    @field_validator("*", mode="before")
    @classmethod
    def _usable_text(cls, value: Any) -> Any:
        _check_text(value)
        return value


LARGEST_INT = 2**31 - 1
"""Bound of ints without one of their own: shapes and counters of back-ends are 32 bits."""
LARGEST_FLOAT = 3.4e38
SMALLEST_FLOAT = 1.2e-38
"""Bounds of positive floats without bounds of their own, those of float32: beyond, they are infinite or 0."""
MOST_PROCESSES = 1024
LARGEST_SIZE = 2**63 - 1
MOST_SECONDS = 10**8


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):  # to Python, True is the number 1
        raise ValueError("a truth value is not a number")
    return value


def _positive_or_minus_one(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("-1 or at least 1")
    return value


def _zero_or_at_least(smallest: float) -> AfterValidator:
    def check(value: float) -> float:
        if 0 < value < smallest:
            raise ValueError(f"0 or at least {smallest}")
        return value

    return AfterValidator(check)


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return [value] if value else []
    return value


Integer = Annotated[int, BeforeValidator(_not_a_bool)]

Number = Annotated[
    float,
    BeforeValidator(_not_a_bool),
    Field(allow_inf_nan=False, ge=-LARGEST_FLOAT, le=LARGEST_FLOAT),
]


PositiveInt = Annotated[Integer, Field(gt=0, le=LARGEST_INT)]

Count = Annotated[Integer, Field(ge=0, le=LARGEST_INT)]

Processes = Annotated[Integer, Field(gt=0, le=MOST_PROCESSES)]

Seed = Annotated[Integer, Field(ge=0, le=2**64 - 1), Expected("int of 64 bits >= 0")]

TopK = Annotated[Integer, Field(ge=-1, le=LARGEST_INT), Expected("int >= -1 (-1 and 0: off)")]

PositiveOrAll = Annotated[
    Integer, AfterValidator(_positive_or_minus_one), Field(le=LARGEST_INT), Expected("int > 0, or -1")
]

Every = Annotated[PositiveOrAll, Expected("int > 0, or -1 for never")]


PositiveFloat = Annotated[Number, Field(gt=0, ge=SMALLEST_FLOAT)]

Seconds = Annotated[Number, Field(gt=0, ge=SMALLEST_FLOAT, le=MOST_SECONDS)]

NonNegativeFloat = Annotated[Number, Field(ge=0)]

Fraction = Annotated[Number, Field(ge=0, le=1)]

Probability = Annotated[Number, Field(gt=0, le=1)]

# Log-probs are divided by it: nearer to 0 they overflow.
Temperature = Annotated[Number, _zero_or_at_least(0.01), Field(ge=0, le=100), Expected("0, or 0.01 to 100")]


Text = Annotated[str, Field(min_length=1)]

Names = Annotated[list[Text], BeforeValidator(_one_or_many), Expected("string or list of strings")]

_Module = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]

Modules = Annotated[_Module | list[_Module] | None, Expected("package name, list of package names, or null")]


if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[tuple(ENGINES)]

ComputeDtype = Literal["auto", "float32", "bfloat16"]

AttentionName = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]

KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl_clamped", "full"]

LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class Needs(Limit):
    """Marker on a field that some back-ends only honour: what they must offer (``Kind.offers``)."""

    ability: str | None = None
    """Ability of the engine of the key's model; None: the rollout must honour the key."""

    def words(self, path: str, at: At | None = None) -> tuple[str, str]:
        """Name the back-ends that do not offer it, or that of the run, and those that do."""
        key, table = ("rollout.name", ROLLOUTS) if self.ability is None else ("strategy", ENGINES)
        able = [name for name, kind in table.items() if (self.ability or last_word(path)) in kind.offers]
        found = " or ".join(name for name in table if name not in able)
        if at is not None:
            key = "actor_rollout_ref.rollout.name" if self.ability is None else at.config.strategy_key(path)
            found = attrgetter(key)(at.config)
        honour = "honours it" if len(able) == 1 else "honour it"
        what = honour if self.ability is None else ABILITIES.get(self.ability, "reads it")
        return f"{self.when} with {key}={found}".lstrip(), f"only {' and '.join(able)} {what}"

    def refusal(self, at: At) -> str:
        return "; ".join(replace(self, when="not").words(at.path, at))


def last_word(path: str) -> str:
    """Return the name of a key without its sections."""
    return path.rpartition(".")[2]


def engine_at(at: At) -> EngineKind:
    """Return the kind of the engine of this key's model."""
    return ENGINES[at.config.strategy_of(at.path)]


def needs(
    ability: str,
    in_use: Callable[[At], bool] = lambda at: True,
    *,
    when: str = "",
    level: Literal["warning", "error"] = "error",
) -> Needs:
    """Mark a key that, where ``in_use``, needs an engine that offers ``ability``."""
    return Needs(
        when, lambda at: bool(in_use(at)) and ability not in engine_at(at).offers, "", level, ability
    )


def honoured_where(in_use: Callable[[At], bool] = lambda at: True) -> Needs:
    """Mark a key of ``actor_rollout_ref.rollout`` that some rollouts only honour, where it is ``in_use``."""
    return Needs("", lambda at: bool(in_use(at)) and not rollout_honours(at), "", "warning")


def rollout_honours(at: At) -> bool:
    """Return True if the chosen rollout honours the key."""
    return last_word(at.path) in ROLLOUTS[at.config.actor_rollout_ref.rollout.name].offers


S = TypeVar("S", bound=Section)


def engine_sections(place: str, *limits: Limit) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the engines' sections of ``place`` to the class of that section.

    ``limits`` mark them, before the need of their engine.
    """
    fields: dict[str, Any] = {
        module.SECTION: (
            Annotated[module.SECTIONS[place], *limits, needs(module.SECTION, level="warning")],
            ...,
        )
        for module in ENGINES.keys_modules()
        if place in module.SECTIONS
    }
    return lambda owner: create_model(
        owner.__name__, __base__=owner, __module__=owner.__module__, __doc__=owner.__doc__, **fields
    )


def rollout_keys(owner: type[S]) -> type[S]:
    """Add the keys of all rollouts to the class of their section."""
    own = [section for module in ROLLOUTS.keys_modules() for section in module.SECTIONS]
    return create_model(
        owner.__name__,
        __base__=(owner, *dict.fromkeys(own)),
        __module__=owner.__module__,
        __doc__=owner.__doc__,
    )


SharedSequences = Annotated[
    PositiveInt,
    no_effect(
        "with one process for each role",
        lambda at: at.value > 1 and at.one_rank,
        "one process shares no sequence; the numbers are the same",
    ),
    needs("shared_sequences", lambda at: at.value > 1, level="warning"),
]


def by_rows(dynamic: str = "use_dynamic_bsz") -> Limit:
    """Mark a size in rows; the neighbouring key ``dynamic`` chooses between rows and tokens."""
    return no_effect(
        f"with {dynamic}=True", lambda at: getattr(at.section, dynamic), "micro-batches are cut by tokens"
    )


def by_tokens(dynamic: str = "use_dynamic_bsz") -> Limit:
    """Mark a size in tokens; the neighbouring key ``dynamic`` chooses between rows and tokens."""
    return no_effect(
        f"with {dynamic}=False", lambda at: not getattr(at.section, dynamic), "micro-batches are cut by rows"
    )


_Beta = Annotated[float, Field(ge=0, lt=1)]

Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2), Expected("list of two floats in [0, 1)")]


class OptimConfig(Section, resumes=MAY_CHANGE):
    """AdamW and its learning-rate schedule, a function of the iteration."""

    lr: Annotated[NonNegativeFloat, Field(le=10)]
    """Learning rate after the warm-up."""
    lr_warmup_steps: Annotated[Integer, Field(ge=-1, le=LARGEST_INT), Expected("int >= -1")]
    """Iterations of warm-up, from the model's first update on; -1: by lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Annotated[
        Fraction, no_effect("with lr_warmup_steps >= 0", lambda at: at.section.lr_warmup_steps >= 0)
    ]
    """Share of all iterations over which the learning rate rises linearly to lr, from the first one on."""
    min_lr_ratio: Annotated[
        Fraction | None,
        no_effect(
            "with warmup_style=constant",
            lambda at: at.section.warmup_style == "constant",
            "cosine and linear decay to it",
        ),
    ]
    """The schedule ends at this share of lr (cosine and linear); null: 0."""
    warmup_style: Literal["constant", "cosine", "linear"]
    """Schedule after the warm-up: constant, or a cosine or linear decay to min_lr_ratio x lr."""
    total_training_steps: Annotated[
        PositiveOrAll,
        no_effect(
            "unless it is -1",
            lambda at: at.value != -1,
            "the schedule ends with the run; trainer.total_training_steps sets its length",
        ),
    ]
    """Set by the trainer to the number of iterations; leave it at -1."""
    betas: Betas
    """AdamW's decay rates of the first and second moments."""
    weight_decay: Annotated[NonNegativeFloat, Field(le=100)]
    """AdamW's decoupled weight decay."""
    eps: Annotated[Number, Field(gt=0, ge=SMALLEST_FLOAT, le=1)]
    """AdamW's constant in the denominator."""


class PpoUpdateConfig(Section, resumes=MAY_CHANGE):
    """The update of a model on an iteration's samples."""

    strategy: Strategy
    """Training back-end; the same for actor and critic."""
    optim: OptimConfig
    ppo_mini_batch_size: PositiveInt
    """Prompts in one optimizer step, over all ranks: ppo_mini_batch_size x rollout.n samples."""
    ppo_micro_batch_size: PositiveInt | None
    """Deprecated: ppo_micro_batch_size_per_gpu times the number of ranks."""
    ppo_micro_batch_size_per_gpu: Annotated[PositiveInt | None, by_rows()]
    """Sequences in one forward and backward pass, per rank; it changes results by rounding only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    ppo_max_token_len_per_gpu: Annotated[PositiveInt | None, by_tokens()]
    """Most tokens in one pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    ulysses_sequence_parallel_size: SharedSequences
    """Neighbouring ranks that share each sequence, in all of its passes; needs use_remove_padding."""
    ppo_epochs: PositiveInt
    """Passes over the samples of one iteration."""
    shuffle: bool
    """Draw the mini-batches in a new seeded order every pass."""
    grad_clip: PositiveFloat
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    loss_agg_mode: LossAggregation
    """Aggregation of token losses; denominators count the whole mini-batch over all ranks."""


Offload = Annotated[
    bool, no_effect("without a GPU", lambda at: at.value and at.on_cpu, "models are in CPU memory anyway")
]

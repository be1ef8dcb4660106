"""Keys under `teacher`: a model whose distributions a policy learns from (strop docs distillation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from strop.config.schema.base import (
    FILES,
    MAY_CHANGE,
    SAME,
    At,
    AttentionName,
    Modules,
    Names,
    NonNegativeFloat,
    Number,
    PositiveInt,
    Section,
    Text,
    engine_sections,
    needs,
    no_effect,
    refused,
)
from strop.errors import ConfigError
from strop.listening import distinct_urls

THE_POLICY = "reference"
"""Value of ``teacher.model.path``: the policy with its LoRA adapters off."""


class Teacher(NamedTuple):
    """One teacher of a run: a model, or servers of one."""

    source: str | None
    """The data source whose rows it judges; None: all rows."""
    model: Any = None
    """Its section ``model``; None: servers have it."""
    servers: Sequence[str] = ()


_SERVERS = TypeAdapter(Annotated[Names, Field(min_length=1)])


def teachers_of(section: Any) -> list[Teacher]:
    """Return the teachers of a section ``teacher``, in the order of ``by_source``.

    Keys of a model that an entry leaves out are those of ``teacher.model``. Raises ``ConfigError`` for an
    entry that names no teacher.
    """
    base = section.model
    if not section.by_source:
        one = Teacher(None, base if base.path else None, distinct_urls(section.servers))
        return [one] if base.path or section.servers else []
    if base.path or section.servers:
        raise ConfigError("teacher.by_source names all teachers; empty teacher.model.path and servers")
    # a section of an engine is of all teachers
    known = [name for name, value in base if not isinstance(value, Section)]
    found = []
    for source, entry in section.by_source.items():
        where, own = f"teacher.by_source.{source}", entry.get("model", {})
        if entry.keys() not in ({"model"}, {"servers"}):
            raise ConfigError(f"{where}: found {sorted(entry)}, expected either model or servers")
        try:
            if "servers" in entry:
                servers = _SERVERS.validate_python(entry["servers"])
                found.append(Teacher(source, None, distinct_urls(servers)))
                continue
            if not isinstance(own, Mapping) or not own.get("path") or own.keys() - known:
                names = ", ".join(known)
                raise ConfigError(f"{where}.model: found {own}, expected path among the keys {names}")
            model = type(base).model_validate({**base.model_dump(), **own})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (where, *entry, *first["loc"])))
            raise ConfigError(f"{place}: found {first['input']!r}; {first['msg']}") from None
        if model.path == THE_POLICY:
            raise ConfigError(
                f"{where}.model.path={THE_POLICY}: the policy teaches all rows or none; name a model"
            )
        found.append(Teacher(source, model))
    return found


def has_teacher(config: Any) -> bool:
    """Return True if the configuration names a teacher."""
    return config.teacher.is_named


NO_TEACHER = no_effect("without a teacher", lambda at: not has_teacher(at.config))


@engine_sections("teacher.model", NO_TEACHER)
class TeacherModelConfig(Section, resumes=SAME):
    """The teacher's model; precision and packing are the policy's."""

    path: Annotated[
        str,
        FILES,
        refused(
            "if reference, without LoRA adapters",
            lambda at: at.value == THE_POLICY and not at.config.trained_model.has_adapters,
            "reference is the policy with its adapters off; set lora_rank, or name a model",
        ),
    ]
    """Model as of the policy's path; reference: the policy with its LoRA adapters off; empty: no teacher."""
    external_lib: Annotated[Modules, MAY_CHANGE]
    """Package, or list of packages, to import first."""
    override_config: dict[str, Any]
    """Values laid over the model's config.json."""
    trust_remote_code: Annotated[bool, MAY_CHANGE]
    """Run Python code that comes with the model."""
    attn_implementation: Annotated[AttentionName | None, MAY_CHANGE]
    """Attention kernel of transformers; null: its choice."""


def _in_use(at: At) -> bool:
    return has_teacher(at.config)


def _wrong_use(at: At) -> bool:
    wrong = "loss" if at.section.kl == "sampled" else "advantage"
    return _in_use(at) and at.value == wrong


class _TeachingConfig(Section, resumes=SAME):
    """Keys of every teacher."""

    model: TeacherModelConfig
    kl: Any
    js_weight: Annotated[
        Number,
        Field(gt=0, lt=1),
        no_effect("unless teacher.kl=js", lambda at: at.value != 0.5 and at.section.kl != "js"),
    ]
    """The teacher's share of the mixture of js (beta of generalized JSD); at 0 and 1 it would be 0."""
    top_k: Annotated[
        PositiveInt | None,
        NO_TEACHER,
        refused(
            "with teacher.kl=sampled", lambda at: at.section.kl == "sampled", "it reads one word; set null"
        ),
    ]
    """Compare the teacher's k likeliest words, and all others as one; null: all words."""
    coef: Annotated[NonNegativeFloat, MAY_CHANGE, NO_TEACHER]
    """Weight of the teacher's part."""

    @property
    def is_named(self) -> bool:
        """True if there is a teacher."""
        return bool(self.model.path)


class SftTeacherConfig(_TeachingConfig):
    """A teacher of given answers."""

    kl: Annotated[Literal["reverse", "forward", "js"], NO_TEACHER]
    """Divergence of whole distributions."""


@engine_sections("teacher", NO_TEACHER)
class TeacherConfig(_TeachingConfig):
    """A teacher, alone or beside a reward."""

    kl: Annotated[
        Literal["reverse", "forward", "js", "sampled"],
        NO_TEACHER,
        needs("whole_logits", lambda at: _in_use(at) and at.value != "sampled", when="unless sampled"),
    ]
    """Divergence of whole distributions, or the reverse KL's estimate by the sampled token alone."""
    use: Annotated[
        Literal["auto", "loss", "advantage"],
        NO_TEACHER,
        refused(
            "if loss with teacher.kl=sampled, or advantage with others",
            _wrong_use,
            "the sampled estimate is an advantage, as its own gradient is not the KL's, and the others are a "
            "loss; set it to auto",
        ),
    ]
    """auto: a part of the advantages with sampled, of the loss with the other kinds."""
    by_source: dict[str, dict[str, Any]]
    """Teacher of each data_source, as {math: {model: {path: A}}, code: {servers: [URL]}}; {}: one for all."""
    servers: Annotated[
        Names,
        MAY_CHANGE,
        refused(
            "with teacher.model.path",
            lambda at: bool(at.value and at.section.model.path),
            "one of them is the teacher",
        ),
    ]
    """URLs of servers of vLLM that have the teacher, in place of a model, with teacher.kl=sampled."""
    token_env: Annotated[Text | None, MAY_CHANGE, NO_TEACHER]
    """Environment variable with the servers' token."""

    @property
    def is_named(self) -> bool:
        """True if there is a teacher."""
        return bool(self.model.path or self.servers or self.by_source)

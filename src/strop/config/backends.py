"""Training engines and rollouts by name, and what the configuration has to know of each: its kind.

A back-end is a package and one entry here. Its module ``kind`` holds ``KIND``, an ``EngineKind`` or a
``RolloutKind``; its module ``keys``, if it has one, its keys, from which the schema is composed.
Both import neither torch nor the back-end's own packages, and importing them has no effect.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from strop.config.checks.finding import Finding
from strop.config.names import is_installed

if TYPE_CHECKING:
    from strop.config.memory.facts import ModelFacts


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank by purpose; None for a model of unknown size."""

    resident: dict[str, int | None]
    """Memory held throughout."""
    phases: dict[str, int | None]
    """Memory held in one phase of an iteration; the phases follow one another."""

    @property
    def held(self) -> int | None:
        """Resident memory; None if any part is unknown."""
        return total(*self.resident.values())

    @property
    def peak(self) -> int | None:
        """Resident memory and the largest phase; None if any part is unknown."""
        sizes = [size for size in self.phases.values() if size is not None]
        return total(self.held, max(sizes, default=0)) if len(sizes) == len(self.phases) else None


def total(*parts: int | None) -> int | None:
    """Return the sum; None if any part is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


ABILITIES = {
    "adapters": "trains LoRA adapters",
    "whole_logits": "computes whole logits, which the full KL needs",
    "shared_sequences": "shares sequences by ulysses_sequence_parallel_size",
    "selective": "keeps the results of single operators in a checkpointed layer",
    "layers_of_transformers": "computes with the layers of transformers",
    "supervised": "trains on given answers",
    "padding": "pads sequences",
    "pictures": "reads pictures",
    "branches": "computes sessions with branches",
}
"""Abilities that only some engines have, in words for errors."""


class Kind:
    """Facts about a back-end that the configuration needs."""

    package: ClassVar[str | None] = None
    """Package that must be installed."""
    distribution: ClassVar[str | None] = None
    """Name under which it is installed; its version is recorded with a run."""
    install: ClassVar[str] = ""
    """Way to install it, in words."""
    offers: frozenset[str]
    """Abilities of an engine (``ABILITIES``) and the name of its section; keys that a rollout honours."""

    @property
    def installed(self) -> bool:
        """True unless a required package is missing."""
        return self.package is None or is_installed(self.package)

    def load(self, reference: str) -> Any:
        """Import one of its classes ("module:class")."""
        return load_backend(reference)

    def rules(self, config: Any) -> Iterator[Finding]:
        """Check the keys of the back-end in ``config``, the configuration of a run that uses it."""
        yield from ()


# The section of a model in the configuration, by the name of a pass (of ``MICRO_BATCHES``, or update).
_MODELS = {
    "actor": "actor_rollout_ref.actor",
    "log_prob": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "values": "critic",
    "reward_model": "reward_model",
    "teacher": "teacher",
    "update": "model",
}


class EngineKind(Kind):
    """A value of ``actor.strategy``, ``critic.strategy`` or ``update.strategy``."""

    engine: ClassVar[str]
    """"module:class" of the ``Engine``."""
    section: ClassVar[str]
    """Name of its section of keys."""
    sections: ClassVar[Mapping[str, Any]]
    """Section of the configuration that has one -> its class."""
    needs_gpu: ClassVar[bool] = False
    """It computes on GPUs only."""
    accumulation: ClassVar[str | None] = None
    """Its key that says whether whole gradients are kept until a step; null: chosen from the memory."""

    def key_of(self, name: str) -> str:
        """Return the path of the section of its keys for the model of the pass ``name``."""
        model = _MODELS[name]
        return next(
            f"{place}.{self.section}" for place in self.sections if f"{place}.".startswith(f"{model}.")
        )

    def section_of(self, config: Any, name: str) -> Any:
        """Return the section of its keys for the model of the pass ``name``."""
        return attrgetter(self.key_of(name))(config)

    def ranks_with_same_rows(self, config: Any, name: str, ranks: int) -> int:
        """Return how many of ``ranks`` ranks get the same rows in the pass ``name``.

        Raises ``ConfigError`` if the number does not divide the ranks.
        """
        raise NotImplementedError

    def bytes(self, config: Any, name: str, facts: ModelFacts | None, *, trains: bool) -> int | None:
        """Return the bytes of one rank's part of the model of a pass, with what its training keeps."""
        raise NotImplementedError

    def update_bytes(self, config: Any, name: str, facts: ModelFacts | None, model: Any) -> int | None:
        """Return the bytes of weights and gradients that an update holds beside a rank's own part."""
        raise NotImplementedError


class RolloutKind(Kind):
    """A value of ``actor_rollout_ref.rollout.name``."""

    replica: ClassVar[str]
    """"module:class" of the rollout that holds a copy of the weights."""
    shared: ClassVar[str | None] = None
    """"module:class" of the rollout that generates on the actor's own module; None: a copy is needed."""
    remedy: ClassVar[str] = "lower data.max_response_length"
    """Way to make its memory smaller, in words."""
    reads_pictures: ClassVar[bool] = False
    """Prompts may have pictures."""
    package_of_pictures: ClassVar[str | None] = None
    """Package that it needs for them."""
    keeps_lockstep: ClassVar[bool] = True
    """Sessions of programs get as far in every run, however fast their requests come."""
    serves: ClassVar[bool] = True
    """It can generate for ``strop serve``."""
    takes_broadcasts: ClassVar[bool] = True
    """Its processes can join a channel from the actor."""
    offers: frozenset[str] = frozenset()

    def suits(self, device: str, model_path: str) -> tuple[bool, str]:
        """Return whether ``rollout.name=auto`` means this back-end, and why; the first one is taken."""
        return False, ""

    def missing_for_pictures(self) -> str | None:
        """Return the package that pictures need and that is not installed; else None."""
        name = self.package_of_pictures
        return None if name is None or is_installed(name) else name

    def fault_of_pictures(self, config: Any) -> str | None:
        """Return why it computes the pictures of the run's model otherwise than the trainer; else None."""
        return None

    def bytes(self, config: Any, samples: int, facts: ModelFacts | None) -> Forecast:
        """Return the memory of one rank that generates ``samples`` samples in an iteration."""
        return Forecast({}, {})

    def share_fits(self, config: Any, facts: ModelFacts, beside: Forecast, size: int) -> Iterator[Finding]:
        """Compare what it takes of a GPU of ``size`` bytes at its start with what it and the trainer need.

        ``beside`` is the memory of the trainer on that GPU.
        """
        yield from ()

    def dtype(self, config: Any) -> str:
        """Return the dtype of the rollout's weights."""
        return config.actor_rollout_ref.model.compute_dtype

    def settled(self, config: Any) -> dict[str, Any]:
        """Return the values of its keys that depend on the machine where they are not written."""
        return {}

    def policy_changing_keys(self, config: Any) -> list[str]:
        """Return its keys with which the sampler follows another distribution than the policy's."""
        return []

    def outside(self, config: Any) -> Iterator[Finding]:
        """Check what the configuration names outside of this process, as far as it answers."""
        yield from ()

    def keeps_weights(self, config: Any) -> bool:
        """Return True if it samples by weights that it has, and none are loaded or sent."""
        return False

    def forbids_growing_segments(self, config: Any) -> bool:
        """Return True if torch's allocator must not use expandable segments in its processes."""
        return False


K = TypeVar("K", bound=Kind)


class Backends(Mapping[str, K], Generic[K]):
    """Kinds by name; each is imported when it is asked for."""

    def __init__(self, packages: dict[str, str]) -> None:
        self._packages = packages

    def __getitem__(self, name: str) -> K:
        return importlib.import_module(f"{self._packages[name]}.kind").KIND

    def __iter__(self) -> Iterator[str]:
        return iter(self._packages)

    def __len__(self) -> int:
        return len(self._packages)

    def __contains__(self, name: object) -> bool:
        return name in self._packages

    def keys_modules(self) -> Iterator[ModuleType]:
        """Import and yield the modules ``keys`` of the back-ends that have one."""
        for package in self._packages.values():
            try:
                yield importlib.import_module(f"{package}.keys")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.keys":
                    raise


ENGINES: Backends[EngineKind] = Backends(
    {"fsdp": "strop.engines.torch", "megatron": "strop.engines.megatron"}
)

ROLLOUTS: Backends[RolloutKind] = Backends(
    {"vllm": "strop.rollout.vllm", "hf": "strop.rollout.hf", "http": "strop.rollout.http"}
)
"""In the order in which ``auto`` prefers them."""


def load_backend(reference: str) -> Any:
    """Import the attribute that ``reference`` ("module:attribute") names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def engines_with(ability: str) -> str:
    """Return the names of the engines that have an ability of ``ABILITIES``, in words."""
    return " or ".join(name for name, kind in ENGINES.items() if ability in kind.offers)

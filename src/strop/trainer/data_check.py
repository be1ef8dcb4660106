"""What is wrong with prompt files, from their footers and the column of data sources; without torch.

For ``strop check``: a run looks at every row, and gives the same messages. Files that are not on this machine
are left to the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from strop.config.paths import expand, is_url
from strop.config.reward_parts import RULE, RewardPart, read_parts
from strop.config.schema import Config
from strop.data.parquet import (
    UNNAMED_SOURCE,
    PromptTable,
    check_columns,
    no_sources,
    read_scoring_columns,
    require_ground_truths,
    sources_of,
)
from strop.errors import DataError, RewardError, StropError
from strop.rewards.parts import require_scored_source
from strop.rewards.router import Router, UnknownSourceError


def data_problems(config: Config) -> list[str]:
    """One line for everything that is wrong with the files that the run would read."""
    data, scoring = config.data, _Scoring.of(config)
    problems: list[str] = []
    for files, validates in ((data.train_files, False), (data.val_files, True)):
        if config.trainer.val_only and not validates:
            continue
        if not files or any(is_url(file) or not Path(expand(file)).exists() for file in files):
            continue
        try:
            table = read_scoring_columns(files, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key)
            check_columns(table, data.prompt_key, data.reward_fn_key)
            if scoring is not None:
                problems += scoring.problems(table, data.reward_fn_key, validates=validates)
        except DataError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


class _Scoring(NamedTuple):
    """What scores the rows: the reward manager of strop without what needs torch."""

    parts: Mapping[str, RewardPart]
    router: Router | None
    """None: a function of the user's own scores every source."""
    has_reward_model: bool
    may_register: bool
    """Whether a library that the run imports may know further sources."""

    @classmethod
    def of(cls, config: Config) -> _Scoring | None:
        """None where that cannot be said: the manager is the user's own, or an option is wrong."""
        rewards = config.reward_model
        if rewards.reward_manager not in ("naive", "prime"):
            return None
        try:
            parts = read_parts(rewards.parts)
            router = None
            if config.custom_reward_function.path is None:
                router = Router(rewards.reward_kwargs.get("scorer_kwargs"))
        except (StropError, AttributeError, TypeError):  # the options may be anything
            return None
        may_register = config.actor_rollout_ref.model.external_lib is not None
        return cls(parts, router, rewards.enable, may_register)

    def problems(self, table: PromptTable, reward_fn_key: str, *, validates: bool) -> Iterator[str]:
        """What a run would say of the rows of ``table``."""
        sources = sources_of(table, reward_fn_key)
        for error in self._unscored(sources, has_reward_model=self.has_reward_model):
            is_unknown = isinstance(error, UnknownSourceError)
            if is_unknown and error.data_source == UNNAMED_SOURCE:
                yield str(no_sources(table, reward_fn_key))
            elif not (is_unknown and self.may_register):
                yield str(error)
        if self.router is None:
            return
        by_model = self.has_reward_model
        if validates:  # by rules alone, where all rows have one
            by_model = by_model and any(self._unscored(sources, has_reward_model=False))
        ruled = {s for s in sources if self.router.is_built_in(s) and self.parts[RULE].weight(s) != 0}
        try:
            require_ground_truths(table, reward_fn_key, ruled, by_model=by_model)
        except DataError as error:
            yield str(error)

    def _unscored(self, sources: set[str], *, has_reward_model: bool) -> Iterator[RewardError]:
        known = [] if self.router is None else self.router.sources
        for source in sorted(sources):
            try:
                require_scored_source(
                    self.parts,
                    source,
                    has_rule=self.router is None or source in known,
                    has_reward_model=has_reward_model,
                    known=known,
                )
            except RewardError as error:
                yield error

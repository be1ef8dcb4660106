"""Keys of ``actor_rollout_ref.rollout.http``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from strop.config.schema.base import (
    LARGEST_INT,
    MAY_CHANGE,
    Count,
    Integer,
    Names,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Text,
    honoured_where,
    no_effect,
)

_OWN_SERVERS = no_effect(
    "with rollout.http.urls", lambda at: bool(at.config.actor_rollout_ref.rollout.http.urls)
)


class StartConfig(Section, resumes=MAY_CHANGE):
    """Servers that the run starts on this machine, of `rollout.tensor_model_parallel_size` processes each."""

    n: Annotated[Processes, _OWN_SERVERS]
    """Servers; they end with the run, however it ends."""
    args: Annotated[list[Text], _OWN_SERVERS]
    """Further arguments of vLLM's command."""


class HTTPConfig(Section, resumes=MAY_CHANGE):
    """Servers that generate (strop docs http_rollout)."""

    urls: Names
    """Servers that run already, or a file with a URL on each line, read again at every transfer."""
    keep_weights: bool
    """The weights of the servers are evaluated: none are loaded here or sent; for trainer.val_only."""
    start: StartConfig
    slots: PositiveInt | None
    """Samples at once on the clock of batches ahead; null: max_num_seqs x servers at the start of the run."""
    min_servers: Annotated[Integer, Field(gt=0, le=LARGEST_INT)]
    """With fewer live servers the rollout waits patience_s, and then fails."""
    max_restarts: Annotated[Count, _OWN_SERVERS]
    """Restarts of a server in a row, without an answer between."""
    retries: Annotated[Integer, Field(gt=0, le=100)]
    """Failures of a request on one server, or of its health route, before another one is taken."""
    deadline_s: Seconds | None
    """Seconds for an answer; null: 10 x the slowest so far, at least patience_s."""
    patience_s: Seconds
    """Seconds that the rollout waits for servers, and they may take for a transfer."""
    token_env: Text | None
    """Environment variable with the servers' token (STROP_TOKEN there); needed beyond this machine."""
    open_network: bool
    """Allow URLs beyond this machine without a token."""
    proxy: Text | None
    """URL of a proxy for the servers, or the environment variable with it; HTTP_PROXY is ignored."""


class ServersConfig(Section, resumes=MAY_CHANGE):
    """The section of servers."""

    http: Annotated[HTTPConfig, honoured_where()]


SECTIONS = (ServersConfig,)
"""Classes of keys that are part of ``actor_rollout_ref.rollout``."""
NAMES = frozenset(("http", *HTTPConfig.model_fields, *StartConfig.model_fields))
"""Keys of the section, and their sections."""

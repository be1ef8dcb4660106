"""Keys under `agent`: a program that owns its loop, and samples from the policy through an endpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.schema.base import (
    MAY_CHANGE,
    SAME,
    SAME_AHEAD,
    Integer,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Text,
    no_effect,
)


def uses_agent(config: Any) -> bool:
    """Return True if samples are sessions of a program."""
    return bool(config.agent.path or config.agent.command)


UNUSED = no_effect("without agent.path and agent.command", lambda at: not uses_agent(at.config))


class AgentConfig(Section, resumes=SAME):
    """A program of yours that samples from the policy through an endpoint; see strop docs agents."""

    path: Text | None
    """Program of each sample: file.py:run, as run(row, base_url, api_key); it may be async."""
    command: Text | None
    """The same as a shell command: OPENAI_BASE_URL, OPENAI_API_KEY, the row as JSON on its input."""
    parser: Annotated[Text, UNUSED]
    """Notation of tool calls: auto (as the chat template writes them), a name, or file.py:function."""
    concurrency: Annotated[PositiveInt | None, SAME_AHEAD, UNUSED]
    """Programs that run at the same time on each rank; null: all, of a command 16."""
    lockstep: Annotated[bool, UNUSED]
    """Sample once every running program waits for an answer: equal log-probs whatever their delays."""
    max_calls: Annotated[PositiveInt, UNUSED]
    """Answers that a program may ask for."""
    timeout: Annotated[Seconds, MAY_CHANGE, UNUSED]
    """Total seconds that a program may take between its calls before its sample is lost."""
    replay: Annotated[Literal["fresh", "check"], MAY_CHANGE, UNUSED]
    """Program that asks otherwise when it is started again: it goes on from there, or is an error."""
    processes: Annotated[Processes, MAY_CHANGE, UNUSED]
    """Processes for programs, on each rank of the rollout."""
    memory_limit_mb: Annotated[PositiveInt | None, MAY_CHANGE, UNUSED]
    """Limit of a process's private memory, and of each that it starts, in MiB; null: none."""
    host: Annotated[Text, MAY_CHANGE, UNUSED]
    """Address on which the endpoint listens."""
    port: Annotated[Integer, Field(ge=0, le=65535), MAY_CHANGE, UNUSED]
    """Its port on the first rank, one more on each further rank; 0: a free one."""

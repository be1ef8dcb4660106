"""Keys under `environment`: the classes and tools that answer the policy's turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from strop.config.schema.base import (
    MAY_CHANGE,
    SAME,
    Expected,
    Names,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Text,
    no_effect,
)


def uses_environment(config: Any) -> bool:
    """Return True if samples have several turns, which an environment or tools answer."""
    return bool(config.environment.path or config.environment.tools)


UNUSED = no_effect(
    "without environment.path and environment.tools", lambda at: not uses_environment(at.config)
)


def _name_alone(value: object) -> object:
    return {"": value} if isinstance(value, str) and value else value or {}


class EnvironmentConfig(Section, resumes=SAME):
    """A class of yours, or tools, that answer the policy's turns; see strop docs environments."""

    path: Annotated[
        dict[str, Text],
        BeforeValidator(_name_alone),
        Expected("file.py:Class, gym:ID, mcp:COMMAND, or a mapping of names to these"),
    ]
    """file.py:Class, gym:ID, mcp:COMMAND, mcp:URL; or {name: one of these}, by the column `environment`."""
    tools: Names
    """Further tools: file.py:function, file.py:Class, python (the sandbox), mcp:COMMAND, mcp:URL."""
    max_turns: Annotated[PositiveInt, UNUSED]
    """Turns of the policy; the calls of the last one are run, and its answers are not inserted."""
    turn_length: Annotated[PositiveInt | None, UNUSED]
    """Longest turn, in tokens; null: as long as data.max_response_length, which counts the answers, too."""
    answer_length: Annotated[PositiveInt, UNUSED]
    """Longest answer, in tokens; a longer one is cut in the middle, with a note."""
    parser: Annotated[Text, UNUSED]
    """Notation of calls: auto (as the chat template writes them), a name, or file.py:function."""
    answer_role: Annotated[Literal["auto", "tool", "user"], UNUSED]
    """Role of a tool's answer; auto: tool. user: for chat templates that show no answers of tools."""
    timeout: Annotated[Seconds, MAY_CHANGE, UNUSED]
    """Seconds that a method may take before its process is ended."""
    seed: Annotated[Literal["prompt", "sample"], UNUSED]
    """Seed that `reset` gets: one for all samples of a prompt, or one for each sample."""
    error: Annotated[Literal["tell", "end"], UNUSED]
    """Result of a method's error: one line that the policy reads, or the end of the sample."""
    malformed: Annotated[Literal["tell", "end"], UNUSED]
    """The same for a call that cannot be read, or that does not fit the tool."""
    replay: Annotated[Literal["check", "recorded"], MAY_CHANGE, UNUSED]
    """Answers of an environment that is rebuilt: an error where they differ, or those that were recorded."""
    processes: Annotated[Processes, MAY_CHANGE, UNUSED]
    """Processes for environments, on each rank of the rollout."""
    concurrency: Annotated[PositiveInt, MAY_CHANGE, UNUSED]
    """Methods that run in a process at the same time."""
    memory_limit_mb: Annotated[PositiveInt | None, MAY_CHANGE, UNUSED]
    """Limit of a process's private memory, and of each that it starts, in MiB; null: none."""

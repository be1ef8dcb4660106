"""Facts about rollout ``http`` that the configuration needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.config.backends import Forecast, RolloutKind
from strop.config.checks.finding import Finding, error, warning
from strop.config.memory.facts import ModelFacts
from strop.config.memory.shapes import weights
from strop.config.placement import Placement, is_written, uses_gpu
from strop.config.schema.environment import uses_environment
from strop.errors import ConfigError, raised_as
from strop.listening import distinct_urls, fault_of_token, is_loopback, server_faults
from strop.rollout.http.keys import NAMES
from strop.rollout.vllm.kind import KIND as VLLM
from strop.rollout.vllm.kind import number_bytes

_ROLLOUT = "actor_rollout_ref.rollout"
_TOKEN_KEY = f"{_ROLLOUT}.http.token_env"
_OF_OWN_SERVERS = (
    "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager",
    "tensor_model_parallel_size", "load_format",
)  # fmt: skip


class HTTPKind(RolloutKind):
    """Rollout ``http``."""

    replica = "strop.rollout.http.engine:HTTPRollout"
    takes_broadcasts = keeps_lockstep = serves = False
    package = distribution = "httpx2"
    install = "pip install httpx2"
    remedy = "set actor_rollout_ref.rollout.weight_transfer=disk"
    offers = (NAMES | VLLM.offers | {"weight_transfer"}) - {"free_cache_engine"}

    def dtype(self, config: Any) -> str:
        """See ``RolloutKind.dtype``: as with ``vllm``."""
        return VLLM.dtype(config)

    def ranks(self, config: Any) -> int:
        """Return the processes of a server that the run starts."""
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        return config.actor_rollout_ref.rollout.tensor_model_parallel_size if is_written(config, key) else 1

    def keeps_weights(self, config: Any) -> bool:
        return config.actor_rollout_ref.rollout.http.keep_weights

    def slots(self, config: Any) -> int:
        """Return how many samples are generated at once on the clock of batches ahead."""
        rollout, http = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.http
        return http.slots or rollout.max_num_seqs * (len(read_urls(http)) or http.start.n)

    def settled(self, config: Any) -> dict[str, Any]:
        return {"dtype": self.dtype(config), "tensor_model_parallel_size": self.ranks(config)}

    def policy_changing_keys(self, config: Any) -> list[str]:
        return VLLM.policy_changing_keys(config)

    def bytes(self, config: Any, samples: int, facts: ModelFacts | None) -> Forecast:
        """See ``RolloutKind.bytes``: the file of the weights, and on a CPU the run's own servers'."""
        if self.keeps_weights(config):
            return Forecast({}, {})
        rollout = config.actor_rollout_ref.rollout
        own = 0 if rollout.http.urls or uses_gpu(config) else rollout.http.start.n
        copy = weights(facts, number_bytes(config))
        received = own * self.ranks(config) if rollout.weight_transfer == "broadcast" else 0
        copies = own + received + (rollout.weight_transfer != "disk")
        return Forecast({"weights in servers and on their way": copy and copies * copy}, {})

    def rules(self, config: Any) -> Iterator[Finding]:
        """Check the servers' addresses, and what is not possible over HTTP."""
        rollout, http = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.http
        placed, trainer, n = Placement.from_config(config), config.trainer, http.start.n
        steps = trainer.async_steps
        if (ranks := placed.ranks(placed.rollout_role)) > 1:
            yield error(
                f"{_ROLLOUT}.name=http: the rollout has {ranks} processes, and one sends all requests; set "
                "actor_rollout_ref.hybrid_engine=False, trainer.resource_pools={learner: [N], http: [1]} and "
                "trainer.placement={Rollout: http}"
            )
        if http.keep_weights and not (http.urls and trainer.val_only and trainer.resume_mode == "disable"):
            yield error(
                f"{_ROLLOUT}.http.keep_weights=True evaluates servers that run: it needs http.urls, "
                "trainer.val_only=True and trainer.resume_mode=disable, as strop eval MODEL --server URL has"
            )
        if steps >= 2 and uses_environment(config):
            yield error(
                f"trainer.async_steps={steps} with {_ROLLOUT}.name=http and an environment: set 0 or 1"
            )
        if rollout.seed_per_sample is False:
            yield error(f"{_ROLLOUT}.seed_per_sample=False: samples would depend on http servers; set auto")
        if fault := fault_of_token(_TOKEN_KEY, http.token_env):
            yield error(fault)
        if "@" in (http.proxy or ""):
            yield error(
                f"{_ROLLOUT}.http.proxy: config.yaml would show its login; put the URL into an environment "
                "variable, and set http.proxy to the variable's name"
            )
        elif http.proxy and not proxy_of(http):
            yield error(f"{_ROLLOUT}.http.proxy={http.proxy}: no URL, and no variable of this name is set")
        yield from VLLM.sampling_rules(config)
        if http.urls:
            try:
                urls = read_urls(http)
            except ConfigError as problem:
                yield error(str(problem))
                return
            yield from _of_urls(urls, config)
            n = len(urls)
        else:
            yield from VLLM.engine_rules(config)
            if uses_gpu(config):
                yield error(
                    f"{_ROLLOUT}.name=http with GPUs: which ones its servers get is not decided here; start "
                    "the servers with CUDA_VISIBLE_DEVICES (strop docs http_rollout), name them in http.urls"
                )
            if not VLLM.installed:
                yield error(
                    f"{_ROLLOUT}.name=http starts servers of vLLM, which is not installed: {VLLM.install}, "
                    f"or name running ones in {_ROLLOUT}.http.urls"
                )
        if http.min_servers > n:
            yield error(f"{_ROLLOUT}.http.min_servers={http.min_servers}: there are {n} servers")

    def outside(self, config: Any) -> Iterator[Finding]:
        """See ``RolloutKind.outside``: compare the facts of the servers that are given."""
        from strop.rollout.http.wire import Lost, differences, facts_of

        http, expected = config.actor_rollout_ref.rollout.http, expected_facts(config)
        for url, found in facts_of(read_urls(http), token_of(http), proxy_of(http)).items():
            if isinstance(found, Exception):
                may_join = isinstance(found, Lost) and not http.keep_weights
                yield (warning if may_join else error)(f"{_ROLLOUT}.http.urls: {url} gives no facts: {found}")
            elif differing := differences(found, expected):
                yield error(
                    f"{_ROLLOUT}.http.urls: {url}: {'; '.join(differing)}; see strop docs http_rollout"
                )


def _of_urls(urls: Sequence[str], config: Any) -> Iterator[Finding]:
    """Check servers that are given."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.weight_transfer == "memory" and not all(map(is_loopback, urls)):
        yield error(
            f"{_ROLLOUT}.weight_transfer=memory: servers on other machines do not see this one's memory; "
            "set it to broadcast or disk"
        )
    if written := {f"{_ROLLOUT}.{name}" for name in _OF_OWN_SERVERS} & set(config.written or ()):
        yield warning(f"no effect with {_ROLLOUT}.http.urls: {', '.join(sorted(written))}")


def read_urls(http: Any) -> list[str]:
    """Return the URLs of the section ``http``, or of the file that it names instead, each once.

    Raises ``ConfigError`` for what is no URL, or may not be used without a token.
    """
    given = http.urls
    if len(given) == 1 and "://" not in given[0]:
        with raised_as(ConfigError, f"{_ROLLOUT}.http.urls={given[0]}", OSError, UnicodeDecodeError):
            lines = Path(given[0]).expanduser().read_text().splitlines()
        if not (urls := [line.strip() for line in lines if line.strip() and not line.startswith("#")]):
            raise ConfigError(f"{_ROLLOUT}.http.urls={given[0]}: it has no URL; expected one on each line")
        given = urls
    found = distinct_urls(given)
    faults = server_faults(
        found,
        _TOKEN_KEY,
        http.token_env,
        is_open=http.open_network,
        open_key=f"{_ROLLOUT}.http.open_network",
        risk=", and its servers take any weights from whoever reaches them",
    )
    if wrong := "; ".join(faults):
        raise ConfigError(f"{_ROLLOUT}.http.urls: {wrong}")
    return found


def token_of(settings: Any) -> str | None:
    """Return the token of servers that are given."""
    return os.environ.get(settings.token_env or "")


def proxy_of(settings: Any) -> str | None:
    """Return ``http.proxy``, or the environment variable that it names instead."""
    given = settings.proxy
    return given if given is None or "://" in given else os.environ.get(given)


def variables_of(config: Any) -> dict[str, str]:
    """Return the environment variables, set here, that keys of the servers of rollout and teacher name."""
    http = config.actor_rollout_ref.rollout.http
    named = filter(None, (http.token_env, http.proxy, config.teacher.token_env))
    return {name: os.environ[name] for name in named if name in os.environ}


def transfer_folder(config: Any) -> Path | None:
    """Return the folder of sealed weights; None: they stay in memory, for servers of this machine."""
    rollout = config.actor_rollout_ref.rollout
    in_memory = rollout.weight_transfer in ("memory", "broadcast") or (
        rollout.weight_transfer != "disk" and all(map(is_loopback, read_urls(rollout.http)))
    )
    return None if in_memory else Path(config.trainer.default_local_dir).expanduser().resolve() / "weights"


def expected_facts(config: Any, dtype: str | None = None) -> dict[str, Any]:
    """Return the facts that every server must have, but for those of the model.

    ``dtype``: that of the weights, which are not quantized; None: unknown, with the servers' own weights.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    reads_text = rollout.stop or rollout.bad_words or rollout.structured_outputs
    return {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "unsupported": None,
        "max_model_len": data.max_prompt_length + data.max_response_length,
        "cuts_prompts_on_a_cpu": False,
        "compiles_on_a_cpu": False,  # its log-probs differ from those of other servers, in the last bits
        **({"reads_text": True} if reads_text else {}),
        **({"dtype": dtype, "quantization": None} if dtype else {}),
    }


KIND = HTTPKind()

"""Classes that vLLM's server imports: weights from a sealed file, their checksums, and the token.

``strop.rollout.http.wire.ARGUMENTS`` names them. ``STROP_TOKEN`` in the server's environment is the token.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import vllm
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from strop.data.hub import local_tokenizer
from strop.errors import ModelError, StropError
from strop.listening import bearer, is_token
from strop.models.loader import load_tokenizer
from strop.rollout.transfer.broadcast import received_file
from strop.rollout.vllm.arguments import model_facts, vocabulary_digest, why_unsupported
from strop.rollout.vllm.held import held_checksums
from strop.rollout.vllm.settings import InProcessUpdate, InProcessWeightTransfer

_STARTED = secrets.token_hex(8)
"""By which a run sees that a server was started again."""


@dataclass
class SealedUpdate(WeightTransferUpdateInfo):
    """A file with all weights, or who broadcasts it, and the version that its header must name."""

    version: str
    path: str = ""
    sender: dict[str, Any] | None = None


class SealedWeightTransfer(InProcessWeightTransfer):
    """Load all weights of a sealed file, or none: the model is not touched before the file is read.

    So a trainer that dies between the calls of an update leaves a usable server.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls: Any = SealedUpdate

    def start_weight_update(self) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: Any) -> None:
        """Read the file, then load it."""
        with contextlib.ExitStack() as until_read:
            path = update_info.path
            if update_info.sender is not None:
                rank = self.parallel_config.rank
                path = until_read.enter_context(received_file(update_info.sender, rank))
            file = until_read.enter_context(safe_open(path, "pt"))
            found = (file.metadata() or {}).get("version")
            if found != update_info.version:
                raise ModelError(f"{path} has the weights {found}, not {update_info.version}")
            staged = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 - no mapping
        super().start_weight_update()
        super().receive_weights(InProcessUpdate(iter(staged)))
        super().finish_weight_update()

    def finish_weight_update(self) -> None:
        """Do nothing."""


WeightTransferEngineFactory.register_engine("strop", SealedWeightTransfer)


class Extension:
    """Methods of vLLM's workers, called by ``/collective_rpc``."""

    vllm_config: Any
    model_runner: Any

    def strop_facts(self) -> dict[str, Any]:
        """Return what a run compares with its own settings."""
        model, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
        device = self.vllm_config.device_config.device_type
        on_cpu = device == "cpu"
        return {
            **model_facts(model.hf_config, is_tied=model.word_embeddings_untied_by_checkpoint),
            "started": _STARTED,
            "quantization": model.quantization,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(model.logprobs_mode),
            "max_model_len": model.max_model_len,
            "generation_config": model.generation_config,
            "unsupported": why_unsupported(model.hf_config, device),
            **_vocabulary(model.tokenizer, model.trust_remote_code),
            "reads_text": not model.skip_tokenizer_init,
            "max_num_seqs": scheduler.max_num_seqs,
            "cuts_prompts_on_a_cpu": on_cpu and bool(scheduler.enable_chunked_prefill),
            "compiles_on_a_cpu": on_cpu and not model.enforce_eager,
            "kernels": {
                "vllm": vllm.__version__,
                "enforce_eager": bool(model.enforce_eager),
                "tensor_parallel_size": self.vllm_config.parallel_config.tensor_parallel_size,
            },
        }

    def strop_checksums(self, names: list[str]) -> dict[str, str]:
        """Return this rank's part of the checksums, as texts: JSON's numbers may lose digits elsewhere.

        ``names`` are those of the checkpoint, as in ``held_checksums``.
        """
        found = held_checksums(self.model_runner.get_model(), names)
        return {name: str(value) for name, value in found.items()}


@functools.cache
def _vocabulary(path: str, trust_remote_code: bool) -> dict[str, str | None]:
    """Return digests of the tokens of a folder or a name on the hub, with and without the added ones."""
    try:
        tokenizer = load_tokenizer(local_tokenizer(path), trust_remote_code=trust_remote_code)
    except StropError:  # a policy's server needs none
        return {"vocabulary": None, "ordinary_tokens": None}
    return {
        "vocabulary": vocabulary_digest(tokenizer),
        "ordinary_tokens": vocabulary_digest(tokenizer, added=False),
    }


Send = Callable[[dict[str, Any]], Awaitable[None]]


class RequireToken:
    """Middleware that answers 401 on every route to requests without the token; to all if there is none."""

    def __init__(self, app: Any) -> None:
        self._app, self._token = app, os.environ.get("STROP_TOKEN", "")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        """Pass on what has the token, and the server's own start and end."""
        given = bearer(dict(scope.get("headers", [])).get(b"authorization", b"").decode(errors="replace"))
        allowed = is_token(given, self._token)
        if scope["type"] == "lifespan" or allowed:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            needed = (
                b"that of rollout.http.token_env or teacher.token_env"
                if self._token
                else b"STROP_TOKEN where the server starts"
            )
            await send({"type": "http.response.body", "body": b"a token is needed: " + needed})

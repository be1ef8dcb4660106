"""Training state on disk, by ``torch.distributed.checkpoint``.

The files hold ``model.<name>`` for every parameter (tied ones once) and persistent buffer, and
``optimizer.<name>.step|exp_avg|exp_avg_sq``, whole or sharded; of LoRA adapters, these alone
(``strop.engines.torch.adapter_state``). Names and values do not depend on the number
of ranks, so a state loads on any number of them.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from strop import ranks
from strop.engines.torch import adapter_state
from strop.engines.torch.shard_files import DigestingWriter, IndexReader
from strop.errors import CheckpointError, is_interrupt
from strop.models.base import RoleModel
from strop.models.loader import persistent_buffers

_FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    EOFError,
    pickle.UnpicklingError,
    dcp.CheckpointException,
)
_ONE_PROCESS = "torch.distributed is disabled"


def materialize(
    optimizer: torch.optim.AdamW, parked: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
) -> None:
    """Create AdamW's (zero) moments before the first step, each parameter's ``parked`` before the next one's.

    A checkpoint taken before it would have nothing to save otherwise. Torch's remedy, a step with learning
    rate 0, would count as a step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            optimizer.state[parameter] = parked(moments)


def save(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path, *, background: bool = False
) -> Future | None:
    """Write the state into ``folder``; see ``write``. Collective."""
    return write(_collect(module, optimizer), folder, background=background)


class _Copied(DefaultStager):
    """Stager of tensors that nothing else writes to."""

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """Return them as they are."""
        return state_dict


def write(
    collected: dict[str, Tensor], folder: Path, *, background: bool = False, copied: bool = False
) -> Future | None:
    """Write tensors, whole ones or this rank's parts, into ``folder``. Collective.

    With ``background`` they are copied to CPU memory, unless they are ``copied``, and written by a thread:
    see ``BackgroundSave`` for the returned future. Raises ``CheckpointError`` if writing fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = _process_group(folder)
    if background:  # torch's thread warns outside of failing_as
        warnings.filterwarnings("ignore", message=_ONE_PROCESS)
    with failing_as(f"cannot write the checkpoint {folder}"):
        if not background:
            dcp.save(collected, storage_writer=DigestingWriter(folder), **options)
            return None
        # The stager that torch takes if it is not given a writer; a file system's writer stages more slowly.
        stager = (_Copied if copied else DefaultStager)(StagingOptions(False, False, False, False))
        saving: Any = dcp.async_save(
            collected, storage_writer=DigestingWriter(folder), async_stager=stager, **options
        )
        saving.add_done_callback(lambda _: stager.close())
        return saving


class BackgroundSave:
    """The latest save of an engine, which may go on while it trains."""

    def __init__(self) -> None:
        self._saving: tuple[Future, Path] | None = None
        self._beginning = threading.Lock()  # another thread may call finish while a save begins

    def begin(self, start: Callable[[], Future | None], folder: Path) -> None:
        """Call ``start``, which returns a future like ``write``, once the save before is done."""
        self.wait()
        with self._beginning:
            self._saving = None
            saving = start()
            self._saving = None if saving is None else (saving, folder)

    def is_done(self) -> bool:
        """See ``Engine.save_is_done``."""
        saving = self._saving
        return saving is None or saving[0].done()

    def finish(self) -> None:
        """See ``Engine.finish_save``; the future is kept, so that an interrupted caller can wait again."""
        with self._beginning:
            saving = self._saving
        if saving is None:
            return
        future, folder = saving
        with _as_checkpoint_error(f"cannot write the checkpoint {folder}"):
            future.result()

    def wait(self) -> None:
        """Wait for the save, also if it fails."""
        if self._saving is not None:
            wait([self._saving[0]])


def load(module: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Read what ``save`` wrote, bit for bit; see ``require_fit`` and ``read``. Collective."""
    collected, adapters = _collect(module, optimizer), _adapters(module)
    layout = collected[adapter_state.LAYOUT].clone() if adapters else None
    require_fit({name: tuple(tensor.shape) for name, tensor in collected.items()}, folder)
    read(collected, folder, **_process_group(folder))
    if layout is not None:
        adapter_state.unpack(collected, layout, adapters, optimizer)


def read(collected: dict[str, Tensor], folder: Path, **options: Any) -> None:
    """Read the tensors called as in ``collected`` into them; by default without the other ranks.

    Raises ``CheckpointError`` if the folder cannot be read.
    """
    with failing_as(f"{folder} cannot be read as the state of this model"):
        dcp.load(collected, storage_reader=IndexReader(str(folder)), **(options or {"no_dist": True}))


def require_fit(wanted: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ``CheckpointError`` if ``folder`` is incomplete, or has other names or shapes than ``wanted``."""
    message = f"{folder} cannot be read as the state of this model"
    with failing_as(message):
        # before any tensor is read: a failure in between would leave a model of two states
        if misfits := _misfits(wanted, stored_shapes(folder)):
            raise CheckpointError(f"{message}: {'; '.join(misfits[:5])}")


def stored_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor stored in ``folder``, by name; needs no process group."""
    entries = IndexReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _collect(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Collect the tensors themselves, not copies, as loading writes into them; but adapters as copies."""
    buffers = {f"model.{name}": buffer for name, buffer in persistent_buffers(module)}
    if adapters := _adapters(module):
        return buffers | adapter_state.flat(adapters, optimizer)
    parameters = dict(module.named_parameters())
    found = {f"model.{name}": weight.detach() for name, weight in parameters.items()} | buffers
    if optimizer is not None:
        for name, parameter in parameters.items():
            for kind, tensor in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{kind}"] = tensor
    return found


def _adapters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of LoRA adapters, with a trained head; empty without adapters."""
    if not isinstance(module, RoleModel) or module.adapters is None:
        return {}
    return dict(module.saved_parameters())


def _misfits(
    wanted: Mapping[str, tuple[int, ...]], stored: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> list[str]:
    missing = [f"it has no {name}" for name in wanted if name not in stored]
    return missing + [
        f"{name} is {list(stored[name][0])} there, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name][0] != shape
    ]


def _process_group(folder: Path) -> dict[str, Any]:
    # Also of one rank: torch refuses a save in the background without a group that has a CPU backend, and the
    # default group that vLLM opens on a GPU has none.
    return {"process_group": ranks.cpu_group(folder.name), "no_dist": not ranks.several()}


@contextlib.contextmanager
def failing_as(message: str) -> Generator[None]:
    """Turn torch's errors about files into a ``CheckpointError`` that begins with ``message``.

    Torch's warning about a single process is hidden: ``no_dist`` is set on purpose.
    """
    with _as_checkpoint_error(message), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ONE_PROCESS)
        yield


@contextlib.contextmanager
def _as_checkpoint_error(message: str) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except _FAILURES as error:
        if is_interrupt(error):  # torch wraps it like any failure of a rank
            raise KeyboardInterrupt from error
        raise CheckpointError(f"{message}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the first line of the underlying failure; torch wraps it in one entry per rank."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"

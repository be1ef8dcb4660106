"""Workers that process the pictures of their rows and compute nothing else, and note what they hold."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForImageTextToText

from strop import pictures
from strop.controller.group import Dispatch, register
from strop.data.pictures.expand import load_image_processor
from strop.errors import DataError
from strop.models import vision
from strop.models.vision import PictureReader
from strop.protocol import DataProto
from strop.rollout.base import Samples, SamplingParams, answer
from strop.workers.base import Worker

N, T = 8, 4
_M_MMAP_THRESHOLD = -3  # of malloc.h


def is_held(digest: int) -> bool:
    try:
        return bool(pictures.size(digest))
    except DataError:
        return False


class Stub(Worker):
    """In place of actor, rollout and critic."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        # Else freed buffers are kept for the next micro-batch, on CPUs. A variable of the environment would
        # be read at the start of a process alone, and this one may be a fork.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
        path = self.config.actor_rollout_ref.model.path
        model = AutoModelForImageTextToText.from_pretrained(path)
        self.reader = PictureReader(model, load_image_processor(Path(path)))
        self.reader._process(torch.zeros(56, 56, 3, dtype=torch.uint8).numpy())  # imports
        self.sent: list[int] = []
        self.columns = 0
        self.memory = [self.now()]
        self.most = {"pictures": 0, "bytes": 0, "pixels": 0}
        """The largest numbers that were held: pictures, bytes of their files, and bytes of pixels."""

    def now(self) -> int:
        found = psutil.Process().memory_info()
        return found.rss - found.shared  # without Ray's store of objects

    @register(Dispatch.ONE_TO_ALL)
    def hold_pictures(self, files: Any) -> None:
        Worker.hold_pictures(self, files)
        self.sent += files
        self.memory.append(self.now())

    def see(self, batch: DataProto) -> None:
        images = batch.batch["images"]
        self.columns = max(self.columns, len(pickle.dumps(images.numpy())))
        for digest in sorted(set(images.flatten().tolist()) - {0})[::16]:  # 400 MB as pixels
            self.reader._processed(digest)
            self.memory.append(self.now())
            self.note()

    def note(self) -> None:
        files = [len(picture.file) for picture in self._pictures.values()]
        pixels = [column.nbytes for columns in vision._recent.values() for column in columns.values()]
        found = {"pictures": len(files), "bytes": sum(files), "pixels": sum(pixels)}
        self.most = {name: max(self.most[name], number) for name, number in found.items()}

    @register(Dispatch.ONE_TO_ALL)
    def forget_pictures(self, digests: Any) -> None:
        Worker.forget_pictures(self, digests)
        found = {name: getattr(self, name) for name in ("sent", "columns", "memory", "most")}
        own = Path(self.config.trainer.default_local_dir) / f"stub-{os.getpid()}.json"
        own.write_text(json.dumps({**found, "held": sum(map(is_held, self.sent))}))

    @register(Dispatch.ONE_TO_ALL)
    def settle(self) -> None:
        """Return once the calls before this one have."""

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder: Path, iteration: int, saved: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    @register(Dispatch.ONE_TO_ALL)
    def sync_rollout(self, version: int) -> None:
        """Load nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Hold nothing."""

    @register(Dispatch.DATA_PARALLEL)
    def generate_sequences(self, prompts: DataProto, **callbacks: Any) -> DataProto:
        self.see(prompts)
        rows = len(prompts) * N
        whole = torch.zeros(rows, dtype=torch.bool)
        samples = Samples(torch.full((rows, T), 5), torch.zeros(rows, T), torch.full((rows,), T), whole)
        return answer(prompts, SamplingParams(max_tokens=T, n=N), samples, pad_token_id=0)

    @register(Dispatch.DATA_PARALLEL)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        zeros = torch.zeros(len(batch), T)
        return DataProto({"old_log_probs": zeros, "entropys": zeros})

    @register(Dispatch.DATA_PARALLEL)
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto({"values": torch.zeros(len(batch), T)})

    @register(Dispatch.DATA_PARALLEL)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        self.see(batch)
        return {"vf_loss": 0.0, "vf_clipfrac": 0.0, "lr": 0.0}

    @register(Dispatch.DATA_PARALLEL)
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        self.see(batch)
        return {"pg_loss": 0.0, "lr": 0.0}

"""The files of one run, under ``trainer.default_local_dir``."""

from __future__ import annotations

from pathlib import Path

from strop.config.load import to_yaml
from strop.config.placement import settled
from strop.config.schema import RootConfig
from strop.files import atomic_write_text
from strop.tracking.jsonl import METRICS_FILE, read_metrics

_RUN_FILES = (
    "config.yaml",
    METRICS_FILE,
    "curves.png",
    "rollouts",
    "validation",
    "final_model",
    "tensorboard",
    "wandb",
    "wandb_run_id.txt",
)
_LATEST = "latest_checkpointed_iteration.txt"


class RunFolder:
    """Names and makes the run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()  # workers have working directories of their own
        self.path.mkdir(parents=True, exist_ok=True)

    def rollouts(self, step: int) -> Path:
        """The samples of an iteration."""
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def validation(self, step: int) -> Path:
        """The validation samples after ``step`` iterations."""
        return self.path / "validation" / f"step_{step:06d}.parquet"

    def validation_report(self, step: int) -> Path:
        """What those samples say of each data source, with intervals."""
        return self.path / "validation" / f"step_{step:06d}.json"

    def last_logged_step(self) -> int:
        """The last step in ``metrics.jsonl``; 0 when nothing is logged."""
        path = self.path / METRICS_FILE
        return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0

    @property
    def final_model(self) -> Path:
        """The trained actor as a Hugging Face folder, when no checkpoints are kept."""
        return self.path / "final_model"

    def write_config(self, config: RootConfig) -> None:
        """The resolved configuration, in place of an earlier one only when it is whole."""
        atomic_write_text(self.path / "config.yaml", to_yaml(settled(config)))

    def latest_checkpoint(self) -> tuple[str, int] | None:
        """What names the latest checkpoint, and when it was written; None when there is none."""
        try:
            return (self.path / _LATEST).read_text().strip(), (self.path / _LATEST).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def archive_previous_run(self) -> None:
        """Move what an earlier run left into ``previous_1``, ``previous_2``, ...: nothing is lost."""
        left = [self.path / name for name in (*_RUN_FILES, _LATEST)] + list(self.path.glob("global_step_*"))
        left = [path for path in left if path.exists()]
        if not left:
            return
        number = 1
        while (archive := self.path / f"previous_{number}").exists():
            number += 1
        archive.mkdir()
        for path in left:
            path.rename(archive / path.name)

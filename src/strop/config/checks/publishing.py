"""Rules about the upload of the trained model to the Hugging Face hub (``trainer.push_to_hub``)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from strop.config.checks.finding import Finding, error
from strop.config.schema import RootConfig

_BRANCH = re.compile(r"(?!.*(?:\.\.|//|\.lock(?:/|$)|\.$))[A-Za-z0-9_][\w.+/-]*(?<!/)", re.ASCII)


def hub(config: RootConfig) -> Iterator[Finding]:
    """Require a token, names that the hub takes, and that the hub may be contacted."""
    settings = config.trainer
    if not settings.push_to_hub or settings.val_only:
        return
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    key, name = "trainer.hub_repo_id", settings.hub_repo_id
    if name is None:
        key, name = "trainer.experiment_name", settings.experiment_name
    try:
        if key == "trainer.experiment_name" and "/" in name:
            raise HFValidationError("it has a '/'")
        validate_repo_id(name)
    except HFValidationError as problem:
        remedy = " Set trainer.hub_repo_id" if key == "trainer.experiment_name" else ""
        yield error(
            f"{key}={name}: no name of a repository on the Hugging Face hub (expected owner/name, of "
            f"letters, digits, '-', '_' and '.', at most 96): {str(problem).rstrip('.')}.{remedy}"
        )
    revision = settings.hub_revision
    if revision is not None and _BRANCH.fullmatch(revision) is None:
        yield error(
            f"trainer.hub_revision={revision}: no name of a branch (expected letters, digits, '-', '_', '.' "
            "and '/')"
        )
    if is_offline_mode():
        yield error(
            "trainer.push_to_hub=True, and HF_HUB_OFFLINE is set: unset it, or train with "
            "trainer.push_to_hub=False and upload later with `strop export RUN --push OWNER/NAME`"
        )
    elif get_token() is None:
        yield error(
            "trainer.push_to_hub=True needs a token with the right to write to the Hugging Face hub, and "
            "found none: log in with `hf auth login`, or set HF_TOKEN"
        )

"""``strop export``: a checkpoint as a Hugging Face folder, on this machine or on the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.checkpoint.folder import source_of_export
from strop.cli.options import add_choice_of_iteration
from strop.config.paths import expand, is_adapter, is_url, runs_near
from strop.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        help="a run folder, whose newest model is taken, a global_step_N folder, the URL of one, or a "
        "model's folder, such as final_model",
    )
    add_choice_of_iteration(parser)
    parser.add_argument("--out", help="the Hugging Face folder to write; must not exist")
    parser.add_argument(
        "--role",
        default="actor",
        choices=("actor", "critic", "reward_model"),
        help="role of the model (actor)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights, from the float32 state of a checkpoint (default: as exported by the run)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge LoRA adapters into their base model",
    )
    parser.add_argument(
        "--push",
        nargs="?",
        const="",
        metavar="OWNER/NAME",
        help="upload the model with a model card to this repository of the Hugging Face hub, which is "
        "created if it is missing (without a name: trainer.hub_repo_id of the run)",
    )
    parser.add_argument("--revision", help="with --push: the branch (that of the run, else main)")
    parser.add_argument("--public", action="store_true", help="with --push: create a public repository")


def run(arguments: argparse.Namespace) -> int:
    given = [f"--{name}" for name in ("revision", "public") if getattr(arguments, name)]
    if arguments.push is None and given:
        raise ConfigError(f"{given[0]} counts with --push OWNER/NAME only")
    if arguments.push is None and arguments.out is None:
        raise ConfigError("strop export needs --out FOLDER, --push OWNER/NAME, or both")
    if arguments.merge and arguments.out is None:
        raise ConfigError("--merge needs --out FOLDER, the merged model's; --push then uploads that")
    source, model = arguments.checkpoint, None
    if not is_url(source):
        if not Path(expand(source)).exists():
            raise CheckpointError(f"{source}: no such folder{runs_near(source)}")
        names = ("role", "step", "best", "dtype", "merge")
        which = {name: getattr(arguments, name) for name in names}
        source = str(source_of_export(Path(expand(source)), **which))
    if arguments.out is not None:
        from strop.checkpoint.export import export

        model = export(
            source,
            arguments.out,
            role=arguments.role,
            dtype=arguments.dtype,
            merge=arguments.merge,
        )
        kind = "LoRA adapter (with --merge: a whole model)" if is_adapter(model) else "model"
        print(f"{kind} in {model}")
    if arguments.push is not None:
        from strop.checkpoint.hub import push

        done = push(
            source,
            role=arguments.role,
            repo_id=arguments.push or None,
            revision=arguments.revision,
            private=not arguments.public,
            dtype=arguments.dtype,
            model=model,
        )
        print(f"published: {done.url}")
    return 0

"""``strop eval MODEL --data FILE``: one validation of a model, with its samples and figures in a folder."""

from __future__ import annotations

import argparse

from strop.cli.options import OneReward, add_model, log_to_console, naming_function, naming_options
from strop.config.backends import ROLLOUTS
from strop.config.checks.inputs import SEVERAL_FILES
from strop.config.load import load_config
from strop.config.schema import Config
from strop.terminal import literal
from strop.trainer.evaluation import evaluate, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add(
        "--data",
        action="append",
        required=True,
        metavar="FILE",
        help="prompts: a .parquet, .jsonl, .json, .csv or .tsv file, or owner/name:split of the hub; several",
    )
    add("--n", type=int, default=1, help="answers to each prompt (1)")
    add("--temperature", type=float, help="sampling temperature; 0: greedy (0 for --n 1, else 1)")
    add("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this probability (1)")
    add("--max-prompt-length", type=int, help="in tokens; a longer prompt is an error (1024, or what fits)")
    add("--max-response-length", type=int, help="in tokens; a longer answer is cut (512, or what fits)")
    generates = parser.add_mutually_exclusive_group()
    generates.add_argument(
        "--rollout", choices=tuple(ROLLOUTS), default="hf", help="engine that generates (hf)"
    )
    generates.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="server whose weights are evaluated, by MODEL's tokenizer (strop docs http_rollout); several",
    )
    add("--token-env", metavar="NAME", help="environment variable with the servers' token")
    add("--batch-size", type=int, default=64, help="prompts in one batch; it changes no result (64)")
    add("--reward-model", metavar="PATH", help="reward model for data sources without a scorer")
    what = "Python file with your reward function"
    add("--reward", "--custom-reward", action=OneReward, metavar="FILE[:NAME]", help=what)
    add("--limit", type=int, metavar="K", help="only the first K prompts of each data source")
    add(
        "--out",
        metavar="DIR",
        help="folder for samples.parquet and results.json (a new one, evaluations/MODEL)",
    )
    add("--show", type=int, default=3, metavar="K", help="samples shown at the end (3)")
    add("overrides", nargs="*", metavar="key=value", help="further keys, as for strop train")


OPTIONS = {
    "actor_rollout_ref.model.path": "MODEL",
    "actor_rollout_ref.rollout.name": "--rollout",
    "actor_rollout_ref.rollout.http.urls": "--server",
    "actor_rollout_ref.rollout.http.token_env": "--token-env",
    "actor_rollout_ref.rollout.val_kwargs.n": "--n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "--temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "--top-p",
    "data.val_files": "--data",
    "data.val_batch_size": "--batch-size",
    "data.max_prompt_length": "--max-prompt-length",
    "data.max_response_length": "--max-response-length",
    "data.val_max_samples": "--limit",
    "reward_model.model.path": "--reward-model",
    "custom_reward_function.path": "--reward",
    "trainer.default_local_dir": "--out",
    "trainer.log_val_generations": "--show",
    SEVERAL_FILES: "--data a.csv --data b.csv",
}
"""Key -> the argument that sets it; messages name what the user wrote."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the model and show the figures; return 0."""
    overridden = {override.partition("=")[0].lstrip("+~") for override in arguments.overrides}
    options = OPTIONS | naming_function(arguments.reward or "")
    names = {key: option for key, option in options.items() if key not in overridden}
    log_to_console(names)
    with naming_options(names):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    from strop.tracking.console import plain_console
    from strop.tracking.report import report_table, shown_table

    report = evaluate(config)
    console = plain_console()
    if report.shown:
        console.print(shown_table(report.shown, title="Samples"))
    console.print(report_table(report, title=f"Evaluation of {arguments.model}"))
    console.print(literal(f"samples and figures in {config.trainer.default_local_dir}"), soft_wrap=True)
    return 0


def config_from(arguments: argparse.Namespace) -> Config:
    """Return the configuration of a command line, with the user's overrides over it."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("debug", "overrides")}
    return load_config(arguments.overrides, values=[settings(**options)])

"""Pages that are written by hand name what the code has; `make check` builds the site and its links."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import strop
from strop import errors
from strop.cli.main import _COMMANDS, _parser, main
from strop.config.keys import all_keys
from strop.config.trees import PPO, TREES
from strop.engines.megatron.settings import FAMILIES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def test_the_python_reference_has_every_public_name():
    documented = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    public = {f"{module}.{name}" for name, module in (strop._FUNCTIONS | strop.BUILDING_BLOCKS).items()}
    assert public <= set(documented)


def test_troubleshooting_has_every_error():
    headings = re.findall(r"^## (\w+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]  # not those of other tests
    raised = {kind.__name__ for kind in kinds if issubclass(kind, errors.StropError)} - {
        "StropError",
        "SeveralErrors",
    }
    assert raised <= set(headings)


def test_quoted_messages_are_those_of_the_code():
    quoted = re.findall(r"^\| (`.*?) \| ", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    quoted = [message for cell in quoted for message in re.findall("`([^`]*…[^`]*)`", cell)]
    texts = "\n".join(
        node.value
        for file in (ROOT / "src/strop").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    parts = [part.strip(" :;.=") for message in quoted for part in message.split("…")]
    assert len(quoted) > 30
    assert [part for part in parts if part not in texts] == []


def test_the_picture_of_the_layers_is_that_of_import_linter():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    lines, drawn = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1].splitlines()[1:], []
    for line in lines:
        names = {*re.findall("[a-z_]+", re.split(" {2,}", line.strip(" └─"))[0])}
        if "└─" in line or not drawn:
            drawn.append(names)
        else:
            drawn[-1] |= names
    assert drawn == [{*layer.split(" | ")} for layer in contract["layers"]]


def test_the_families_of_megatron_are_those_of_its_engine():
    """The other columns are measured by ``make families``, this one is not."""
    rows = re.findall(r"^\| (\w+) \| \w+ \|.*\| (yes|no) \|$", (DOCS / "models.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert {family for family, megatron in rows if megatron == "yes"} == {*FAMILIES}


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a page and the text of a block, of all pages."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        yield from ((page.name, text) for language, text in found if language in languages)


def test_python_of_pages_parses():
    for page, text in blocks("python"):
        ast.parse(text, page)


def test_commands_of_pages_have_these_options():
    """Options of the parsers alone: ``test_keys_of_pages_exist`` has the keys."""
    seen = set()
    for page, text in blocks("bash", ""):
        for line in re.sub(r"\\?\n +", " ", text).splitlines():
            if not (found := re.match(r"\s*(?:ray job submit.* -- +)?strop ([a-z-]+)(?= )(.*)", line)):
                continue
            name, rest = found[1], found[2].replace("<the arguments of the run>", "...")
            words = [word for word in shlex.split(rest, comments=True) if word not in ("...", ";")]
            arguments, unknown = _parser(name).parse_known_intermixed_args(words or ["MODEL"])
            assert not unknown or "unknown" in arguments, f"{page}: strop {name}: {unknown}"
            assert [word for word in unknown if word.startswith("-")] == [], f"{page}: {line}"
            seen.add(name)
    assert seen >= set(_COMMANDS) - {"docs"}


def test_keys_of_pages_exist():
    known = {path for tree in TREES.values() for path in all_keys(tree.schema)}
    parts = {path.rsplit(".", n)[0] for path in known for n in range(path.count("."))}  # keys and sections
    roots = "|".join({path.partition(".")[0] for path in known})
    columns = {"reward_model.ground_truth", "reward_model.style"}
    no_keys = (
        ".override_config.",
        ".override_transformer_config.",
        "trainer.pt",
        "scorer_kwargs",
        "trainer.groups",
    )
    pages = [ROOT / "README.md", *(page for page in DOCS.glob("*.md") if page.stem != "from_verl")]
    unknown = {}
    for page in pages:
        text = re.sub(r"^```python.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        named = re.findall(rf"(?<![\w./*-])((?:{roots})\.[a-z_.]*[a-z_])(?=[=`, ])", text)
        named = {key for key in named if not any(text in key for text in no_keys)} - parts - columns
        unknown[page.stem] = named - {f"{page.stem}.md", "agent.mjs", "agent.sh", "agent.py"}
    assert {page: keys for page, keys in unknown.items() if keys} == {}


def test_sources_name_pages_by_the_command_that_shows_them():
    files = [file for kind in ("py", "yaml") for file in (ROOT / "src/strop").rglob(f"*.{kind}")]
    text = "\n".join(file.read_text() for file in files if file.name != "reference.py")
    named = set(re.findall(r"strop docs (\w+)", text))
    assert len(named) > 10
    assert named <= {page.stem for page in DOCS.glob("*.md")}
    assert re.findall(r"docs/\w+\.md", text) == []  # which the package does not have


def test_a_page_is_printed_as_it_is_into_a_pipe(capsys):
    assert main(["docs", "data"]) == 0
    assert capsys.readouterr().out == (DOCS / "data.md").read_text()
    assert main(["docs"]) == 0
    listed = re.findall(r"^strop docs (\w+) ", capsys.readouterr().out, flags=re.MULTILINE)
    assert listed == sorted(page.stem for page in DOCS.glob("*.md"))
    assert main(["docs", "dta"]) == 2
    assert "did you mean data?" in capsys.readouterr().err
    assert main(["docs", "LoRA"]) == 0
    assert main(["docs", "data.answer_key"]) == 2  # a key
    assert re.search("pages with this word: .*config_data", capsys.readouterr().err)
    assert main(["docs", "nosuchword"]) == 2
    assert "strop docs lists the pages" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_commands_without_a_traceback():
    for arguments in (["docs"], ["docs", "config_critic"], ["keys", "a"]):
        command = [sys.executable, "-m", "strop", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        assert process.communicate()[1] == ""


def test_keys_are_found_by_a_word_of_their_name_or_meaning(capsys):
    assert main(["keys", "lr"]) == 0
    first = capsys.readouterr().out.splitlines()[:2]
    assert first[0] == "actor_rollout_ref.actor.optim.lr=1e-06"
    assert all_keys(PPO.schema)["actor_rollout_ref.actor.optim.lr"].doc in first[1]
    assert main(["keys", "--command", "sft", "passes", "training"]) == 0
    assert "trainer.total_epochs=1\n" in capsys.readouterr().out
    assert main(["keys", "data.train_files"]) == 0
    assert "data.train_files=(required)\n" in capsys.readouterr().out
    assert main(["keys", "data.val_files"]) == 0
    assert "data.val_files=[]\n" in capsys.readouterr().out  # required with trainer.val_only
    assert main(["keys", "learningrate"]) == 2
    assert "learningrate" in capsys.readouterr().err


def test_lines_of_pages_are_short():
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "benchmarks/README.md"]
    long = [
        f"{page.name}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 110 and not line.lstrip().startswith("|")  # a row of a table is one line
    ]
    assert long == []

"""No configuration or broken file ends in a traceback; ``check`` accepts nothing that ``train`` refuses."""

from __future__ import annotations

import pytest

from broken_files import broken_files
from fuzz_inputs import make_inputs, run_all


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_sample_of_configurations_and_broken_files(inputs, tmp_path):
    names = [
        ("train", "prompt not UTF-8"),
        ("train", "config with a text for a number"),
        ("train", "latest is a superscript"),
        ("train", "YAML that is a text"),
        ("sft", "answers of numbers"),
        ("sft", "weights of NaN"),
        ("train-rm", "rejected null"),
        ("dpo", "rejected null"),
        ("eval", "data is a pipe"),
        ("score", "data is a pipe"),
        ("score", "ground truth null"),
    ]
    assert run_all(0, 10, names, inputs, tmp_path) == []


def test_a_sample_of_configurations_of_several_processes(inputs, tmp_path):
    assert run_all(0, 8, [], inputs, tmp_path, several=True) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "several", "number"),
    [
        ("train", False, 400),
        ("train", True, 200),
        ("sft", False, 100),
        ("train-rm", True, 100),
        ("dpo", False, 100),
    ],
)
def test_many_configurations(inputs, tmp_path, kind, several, number):
    assert run_all(1, number, [], inputs, tmp_path, kind=kind, several=several) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, files in broken_files().items() for name in files]
)
def test_a_broken_file(inputs, tmp_path, kind, name):
    assert run_all(0, 0, [(kind, name)], inputs, tmp_path) == []

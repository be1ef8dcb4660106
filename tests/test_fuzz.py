"""No configuration or broken file ends in a traceback; ``check`` accepts nothing that ``train`` refuses."""

from __future__ import annotations

import pytest

from fuzz_inputs import broken_files, run_all
from runs import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_sample_of_configurations_and_broken_files(inputs, tmp_path):
    names = [
        "prompt not UTF-8",
        "config with a text for a number",
        "latest is a superscript",
        "data is a pipe",
    ]
    assert run_all(0, 10, names, inputs, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_configurations(inputs, tmp_path):
    assert run_all(1, 1000, [], inputs, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", broken_files())
def test_a_broken_file(inputs, tmp_path, name):
    assert run_all(0, 0, [name], inputs, tmp_path) == []

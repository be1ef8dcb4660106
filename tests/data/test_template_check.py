"""Chat templates that do not end."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from strop.data import template_check
from strop.errors import DataError

from messages import naming


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** 999999999 }}",  # computed when the template is compiled
        "{% set n = messages | length + 8 %}{{ n ** 999999999 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_check, "_LIMIT_S", 1)
    started = time.monotonic()
    with pytest.raises(DataError, match=naming("data.chat_template", "1 s")):
        template_check.require_end(
            SimpleNamespace(chat_template=template, special_tokens_map={}), "data.chat_template"
        )
    assert time.monotonic() - started < 60  # of the clock, which runs on where the cores are busy


@pytest.mark.parametrize(
    "template",
    [
        None,
        {"default": "{{ messages[0].content }}"},
        "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% broken",
    ],
)
def test_other_templates_are_left_to_the_rendering_of_the_data(template):
    template_check.require_end(SimpleNamespace(chat_template=template, special_tokens_map={}), "a model")

"""Format and length: terms that look at the response alone."""

from __future__ import annotations

import pytest

from strop.rewards.score import exact

from messages import naming


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>so\nand so</think>\n<answer>5 < 6</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("<think>so</think><answer>5</answer> and more", 0.0),
        ("Well. <think>so</think><answer>5</answer>", 0.0),
        ("<think>so</think>5", 0.0),
        ("<answer>5</answer><think>so</think>", 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0.0),
        ("<think>a</think><answer>5", 0.0),
        ("", 0.0),
    ],
)
def test_the_form_is_the_whole_response_with_each_tag_once(text, score):
    assert exact.compute_format_score(text, "5") == score
    assert exact.compute_format_score(text, score=0.5) == score / 2


def test_a_form_may_be_a_custom_pattern():
    assert exact.compute_format_score("so\nit is\n#### 5", pattern=r".*#### \d+") == 1.0
    assert exact.compute_format_score("#### 5 or 6", pattern=r".*#### \d+") == 0.0
    with pytest.raises(ValueError, match="regular expression"):
        exact.compute_format_score("", pattern="(")


def test_a_long_response_does_not_take_long():
    assert exact.compute_format_score("<think>" * 20_000) == 0.0
    assert exact.compute_format_score("<think>" + "x<" * 50_000 + "</think> <answer>5</answer>") == 1.0


@pytest.mark.parametrize(
    ("tokens", "max_length", "buffer", "penalty"),
    [
        # DAPO's own numbers: 16,384 expected tokens and 4,096 of buffer.
        (0, 20_480, 4_096, 0.0),
        (16_384, 20_480, 4_096, 0.0),
        (17_408, 20_480, 4_096, -0.25),
        (18_432, 20_480, 4_096, -0.5),
        (20_480, 20_480, 4_096, -1.0),
        (90_000, 20_480, 4_096, -1.0),
        # Without a buffer it is a step.
        (10, 10, 0, 0.0),
        (11, 10, 0, -1.0),
    ],
)
def test_the_penalty_falls_in_a_line_over_the_buffer(tokens, max_length, buffer, penalty):
    assert exact.overlong_penalty(tokens, max_length=max_length, buffer=buffer) == penalty


def test_words_characters_or_tokens_are_counted():
    text = "one two  three\nfour"
    assert exact.compute_length_score(text, max_length=5, buffer=4) == -0.75
    assert exact.compute_length_score(text, "ground truth", max_length=5, buffer=4, score=2.0) == -1.5
    assert exact.compute_length_score(text, max_length=20, buffer=2, unit="characters") == -0.5
    assert exact.compute_length_score(text, max_length=20, buffer=4, unit="tokens", n_tokens=19) == -0.75


@pytest.mark.parametrize("options", [{"max_length": 0}, {"buffer": -1}, {"max_length": 10, "buffer": 11}])
def test_impossible_lengths_are_errors(options):
    with pytest.raises(ValueError, match=naming("buffer", "max_length")):
        exact.compute_length_score("x", **options)
    with pytest.raises(ValueError, match=naming("unit='bytes'", "'words', 'characters', 'tokens'")):
        exact.compute_length_score("x", unit="bytes")
    with pytest.raises(ValueError, match=naming("unit='tokens'", "'words'")):
        exact.compute_length_score("x", unit="tokens")

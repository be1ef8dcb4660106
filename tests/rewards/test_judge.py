"""``reward_model.judge``: a model on a server rates responses; here a server that answers by a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from strop.config.checks.check import check
from strop.config.load import load_config
from strop.connection import Connection
from strop.errors import ConfigError, RewardError
from strop.rewards.judge import number_in, rate, reason_of_silence, rubric_of, text_of, with_judge

from builders import write_prompts
from messages import naming
from runs import make_inputs, overrides, train

Say = Callable[[str, int], tuple[int, str]]
"""Message and number of the request -> status and answer."""


class Judge(ThreadingHTTPServer):
    """A server of chat completions that keeps its requests."""

    daemon_threads = True

    def __init__(self, say: Say) -> None:
        self.say, self.bodies, self.headers = say, list[dict[str, Any]](), list[dict[str, str]]()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Judge

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        status, text = self.server.say(body["messages"][0]["content"], len(self.server.bodies))
        message, end = {"role": "assistant", "content": text}, "length" if text.endswith("...") else "stop"
        self._send(status, {"choices": [{"message": message, "finish_reason": end}]})

    def _send(self, status: int, answer: Any) -> None:
        raw = json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # a client whose deadline has passed
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)


@pytest.fixture
def serve() -> Iterator[Callable[[Say], Judge]]:
    made: list[Judge] = []

    def start(say: Say) -> Judge:
        made.append(Judge(say))
        return made[-1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def section(url: str, **keys: Any) -> SimpleNamespace:
    usual = {"token_env": None, "model": None, "rubric": None, "scale": [0, 10], "temperature": 0.0}
    return SimpleNamespace(url=url, **usual | keys)


@pytest.mark.parametrize(
    ("answer", "scale", "number"),
    [
        ("8", (0, 10), 8),
        ("Right but for the unit. 7/10", (0, 10), 7),
        ("2 of 4 steps are right.\n\n**5 out of 10**", (0, 10), 5),
        ("Score: 7.5.", (0, 10), 7.5),
        ("10/10", (0, 10), 10),
        ("First 3, then 9 / 10.", (0, 10), 9),
        ("10" + "\n" * 30_000, (0, 10), 10),
        ("7/10.0", (0, 10), 7),
        ("0.5/1.0", (0, 1), 0.5),
        ("8 of 10", (0, 10), 8),
        ("8/**10**", (0, 10), 8),
        ("6 points out of 10", (0, 10), 6),
        ("6 (out of 10)", (0, 10), 6),
        ("6 out of the 10", (0, 10), 6),
        ("6 on a scale of 10", (0, 10), 6),
        ("6 (maximum 10)", (0, 10), 6),
        ("6 (Max: 10)", (0, 10), 6),
        ("6 (max. 10)", (0, 10), 6),
        ("Both of the 2 steps are right. Score of 10", (0, 10), 10),
        ("3 stars out of 5", (1, 5), 3),
        ("Criterion 2 (clarity): 10", (0, 10), 10),
        ("2 of the steps are wrong.\n10", (0, 10), 10),
        ("The 2 claims are right, so I give it a score of 10.", (0, 10), 10),
        ("9/10 at first. Overall, a rating of 10", (0, 10), 10),
        ("8 out of a possible 10", (0, 10), 8),
        ("3 on a scale from 0 to 10", (0, 10), 3),
        ("7/10 (0 to 10)", (0, 10), 7),
        ("On a scale of 0-10: 4", (0, 10), 4),
        ("1,000", (0, 1000), 1000),
        ("5/1000000", (0, 1_000_000), 5),
        ("\u22123", (-5, 5), -3),
        (".5", (0, 1), 0.5),
        ("70%", (0, 100), 70),
        ("<think>first 3, then 2</think> 6", (0, 10), 6),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, scale: tuple[float, float], number: float):
    assert number_in(answer, *scale) == number


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "good",
            "",
            "100",
            "-1",
            "v2 is a name",
            "8,5",
            "1e-3",
            "7-8",
            "$\\frac{7}{10}$",
            "7 or 8x",
            "1.2.3",
            "3 points of the whole 10",
            "7 (10 = right)",
            "7 (max score: 10)",
            "7 (full marks: 10)",
        ),
        *("<think>first 3, then 2", "<think>5 or 6</think> I cannot say"),
    ],
)
def test_an_answer_without_a_plain_number_of_the_scale_is_an_error(answer: str):
    with pytest.raises(RewardError, match="judge"):
        number_in(answer, 0, 10)


def test_a_run_is_scored_by_the_judge_alone(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows need no scorer of their data source; a variable for proxies is ignored."""
    server = serve(lambda text, number: (200, f"Well.\n{number % 3 + 4}"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("JUDGE_KEY", "the key")
    inputs = make_inputs(tmp_path)
    write_prompts(inputs / "train.parquet", 24, data_source="own")
    keys = (
        f"reward_model.judge.url={server.url}/v1",
        "reward_model.judge.token_env=JUDGE_KEY",
        "reward_model.judge.scale=[2,6]",
        "data.val_files=[]",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )
    options = overrides(inputs, tmp_path / "run", *keys)
    assert not check(load_config(options)).errors
    train(options)
    assert len(server.bodies) == 16
    body, header = server.bodies[0], server.headers[0]
    assert (body["model"], body["temperature"], body["seed"]) == ("first", 0, 0)
    assert header["authorization"] == "Bearer the key"
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    expected = [(number % 3 + 2) / 4 for number in range(1, 17)]
    assert line["critic/score/mean"] == pytest.approx(sum(expected) / 16)
    samples = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    by_prompt = {body["messages"][0]["content"] for body in server.bodies}
    for sample in samples:
        assert sample["reward_text/judge/prompt"] in by_prompt
        assert f"[Reference answer]\n{sample['ground_truth']}\n" in sample["reward_text/judge/prompt"]
        assert (int(sample["reward_text/judge/answer"].split()[-1]) - 2) / 4 == pytest.approx(sample["score"])


def _slow(text: str, number: int) -> tuple[int, str]:
    time.sleep(12)
    return 200, "8"


def test_a_chat_is_shown_with_its_roles():
    pictures = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": pictures}]
    assert text_of(chat) == "system: be brief\n\nuser: [picture]what is it?"
    assert text_of([{"role": "user", "content": "1+2="}]) == "1+2="


FAILURES: dict[str, tuple[Say, str]] = {
    "no number": (lambda text, number: (200, "good"), "no plain number"),
    "cut": (lambda text, number: (200, "Step 2..."), "cut at the server's limit"),
    "beyond the scale": (lambda text, number: (200, "80"), "beyond 0 to 10"),
    "slow": (_slow, "longer than 8 s"),
    "failing": (lambda text, number: (500, "8"), "500"),
    "refusing": (lambda text, number: (401, "8"), "refuses"),
}


@pytest.mark.fast("cut", "no number")
@pytest.mark.parametrize("failure", FAILURES)
def test_what_the_judge_cannot_rate_is_a_failed_sample(failure: str, serve: Any, make: Any, batch_of: Any):
    say, why = FAILURES[failure]
    monitored = serve(lambda text, number: say(text, number) if "broken" in text else (200, "8"))
    seconds = 8.0 if failure == "slow" else 30.0
    parts = with_judge({"rule": 0}, section(monitored.url))
    manager = make(parts=parts, error_score=-1.0, max_error_rate=0.5, timeout_s=seconds)
    output = manager(batch_of(["one", "broken", "two"], ["7"] * 3))
    assert output.token_level_scores.sum(dim=1).tolist() == pytest.approx([0.8, -1.0, 0.8])
    assert output.metrics["reward/error_rate"] == pytest.approx(1 / 3)
    strict = make(parts=parts, max_error_rate=0.0, timeout_s=seconds)
    with pytest.raises(RewardError, match=why):
        strict(batch_of(["broken"], ["7"]))


def test_a_judge_that_is_down_stops_the_run_by_its_name(make: Any, batch_of: Any):
    with contextlib.closing(ThreadingHTTPServer(("127.0.0.1", 0), _Handler).socket) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    manager = make(parts=with_judge({"rule": 0}, section(url)), max_error_rate=0.0, timeout_s=30)
    with pytest.raises(RewardError, match=naming(f"the judge at {url}/v1 does not answer")):
        manager(batch_of(["a"], ["7"]))


def test_a_lost_request_is_made_again_and_a_weight_is_the_parts(serve: Any, make: Any, batch_of: Any):
    server = serve(lambda text, number: (503, "") if number == 1 else (200, "5"))
    manager = make(parts=with_judge({"rule": 0, "judge": 0.5}, section(server.url)), timeout_s=30)
    output = manager(batch_of(["a"], ["7"]))
    assert len(server.bodies) == 2
    assert output.token_level_scores.sum().item() == pytest.approx(0.25)


def test_a_rubric_of_a_file_is_filled_in_one_pass(serve: Any, make: Any, batch_of: Any, tmp_path: Path):
    file = tmp_path / "rubric.txt"
    file.write_text("P {prompt} R {response} T {ground_truth} {other}")
    server = serve(lambda text, number: (200, "5"))
    manager = make(parts=with_judge({"rule": 0}, section(server.url, rubric=str(file))), timeout_s=30)
    manager(batch_of(["9"], ["{response}"]))
    assert server.bodies[0]["messages"][0]["content"] == "P 1+2= R 9 T {response} {other}"


def test_a_judge_that_is_busy_is_asked_until_it_is_not(serve: Any, make: Any, batch_of: Any):
    server = serve(lambda text, number: (429, "") if number < 4 else (200, "5"))
    manager = make(parts=with_judge({"rule": 0}, section(server.url)), max_error_rate=0.0, timeout_s=30)
    assert manager(batch_of(["a"], ["7"])).token_level_scores.sum().item() == pytest.approx(0.5)


def test_a_judge_that_is_busy_until_the_deadline_is_named_with_its_answer(
    serve: Any, make: Any, batch_of: Any
):
    server = serve(lambda text, number: (429, "your quota is used up"))
    manager = make(parts=with_judge({"rule": 0}, section(server.url)), max_error_rate=0.0, timeout_s=4.0)
    with pytest.raises(RewardError, match=naming(f"{server.url}/v1", "429", "your quota is used up")):
        manager(batch_of(["a"], ["7"]))


def test_a_validation_by_a_rule_does_not_ask_the_judge(serve: Any, make: Any, batch_of: Any):
    server = serve(lambda text, number: (200, "no"))
    manager = make(parts=with_judge({}, section(server.url)))
    batch = batch_of(["3", "4"], ["3", "3"])
    batch.meta_info["mode"] = "validate"
    assert manager(batch).token_level_scores.sum(dim=1).tolist() == [1.0, 0.0]
    assert server.bodies == []


def test_a_long_text_is_no_path_and_a_key_is_stripped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rubric = "Rate it: / " * 60 + "{response}"
    keys = (f"reward_model.judge.rubric='{rubric}'", "reward_model.judge.url=http://127.0.0.1:8")
    config = load_config(overrides(tmp_path, tmp_path / "run", *keys))
    assert not any("judge" in line for line in check(config).errors)
    assert rubric_of(config.reward_model.judge.rubric) == rubric
    assert Connection("http://127.0.0.1:8", "key\n")._client.headers["authorization"] == "Bearer key"
    with pytest.raises(ConfigError, match=r"^(?!.*secret).*no header takes"):
        Connection("http://127.0.0.1:8", "secret\u20ac")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai"),
        ("https://h/api/v1/chat/completions", "https://h/api/v1"),
    ],
)
def test_addresses_of_services(url: str, base: str):
    assert with_judge({}, section(url))["judge"]["kwargs"]["url"] == base


def test_check_asks_the_judge_once(serve: Any):
    server = serve(lambda text, number: (200, "5"))
    assert reason_of_silence(section(server.url)) is None
    server.shutdown()
    server.server_close()
    assert server.url in str(reason_of_silence(section(server.url)))
    assert server.bodies == []


@pytest.mark.parametrize("rubric", ["rubrik.txt", "Rate it."])
def test_a_rubric_without_the_response_is_refused(rubric: str):
    with pytest.raises(ConfigError, match=naming(rubric, "{response}")):
        rubric_of(rubric)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["url=localhost:8000"], ("reward_model.judge.url", "localhost:8000", "http://HOST:PORT")),
        (["url='http://127.0.0.1:8/v1?key=1'"], ("reward_model.judge.url", "query", "token_env")),
        (["url=http://ada:pw@host/v1"], ("reward_model.judge.url", "login", "token_env")),
        (["url=https://api.example.org"], ("reward_model.judge.url", "token_env")),
        (["url=http://127.0.0.1:8", "token_env=NOT_SET"], ("token_env=NOT_SET", "not set")),
        (["url=http://127.0.0.1:8", "scale=[10,0]"], ("reward_model.judge.scale", "lowest")),
    ],
)
def test_check_names_what_is_wrong_with_a_judge(keys: list[str], words: tuple[str, ...], tmp_path: Path):
    options = [f"reward_model.judge.{key}" for key in keys]
    config = load_config(overrides(tmp_path, tmp_path / "run", *options))
    errors = check(config).errors
    assert any(all(word in text for word in words) for text in errors), errors


def test_a_part_of_the_judges_name_has_no_scorer_of_its_own():
    with pytest.raises(ConfigError, match=naming("reward_model.parts.judge")):
        with_judge({"judge": {"scorer": "exact"}}, section("http://127.0.0.1:8"))


def test_a_temperature_may_be_left_to_the_service(serve: Any):
    server = serve(lambda text, number: (200, "8"))
    options = {"url": f"{server.url}/v1", "token_env": None, "model": "m", "rubric": None, "scale": (0, 10)}
    for temperature in (0.5, None):
        question = [{"role": "user", "content": "1+2="}]
        assert asyncio.run(rate(question, "3", temperature=temperature, **options))["score"] == 0.8
    assert [body.get("temperature", "none") for body in server.bodies] == [0.5, "none"]
    assert "seed" not in server.bodies[1]

"""The page of a run: what it reads, what the server refuses, the report, and both in a real browser."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import math
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from filelock import FileLock
from test_tracking_samples import Letters

from strop.algorithms.token_tree import NOTHING, PROMPT, Call, row_of
from strop.cli.main import main
from strop.errors import DataError
from strop.listening import Address
from strop.page.files import RunFiles
from strop.page.server import PageServer
from strop.protocol import DataProto
from strop.tracking.machine import record_start
from strop.tracking.samples import TOKEN_TEXTS, samples_table, write_table

from browser import CHROMIUM, DRIVER, Browser, url_of
from messages import mentions

TOKEN = "0123456789abcdef"
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    '<img src=x onerror="window.hacked = 3">',
    "<svg/onload=window.hacked=4>",
    "\"><iframe src='javascript:top.hacked=5'></iframe>",
    "<!-- <script> -->",
    "</textarea></style></title><script>window.hacked = 6</script>",
    "javascript:window.hacked=7",
    "{{constructor.constructor('window.hacked=8')()}}",
    "${window.hacked = 9}",
    "&lt;b&gt; &amp;amp; &#60;",
    "__proto__",
    "line\u2028separator\u2029",
)
INVISIBLE = {"\u202eright to left": "[U+202E]", "\x1b[31m \x07": "[U+001B]", "zero\u200bwidth": "[U+200B]"}
"""Text with characters that are shown by number."""


class Texts(Letters):
    """Token 100 + k is the k-th hostile text; others are letters."""

    everything = (*HOSTILE, *INVISIBLE)

    def batch_decode(self, sequences, *, skip_special_tokens):
        letters = super().batch_decode
        return [
            "".join(
                self.everything[i - 100] if i >= 100 else letters([[i]], skip_special_tokens=False)[0]
                for i in ids
            )
            for ids in sequences
        ]


def write_run(folder: Path, *, steps: int = 3) -> Path:
    """Write a run: per step 8 prompts, each a hostile text, with two samples, each of two tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "critic/score/mean": step / 10, "<img src=x onerror=hacked=1>": 1.0, "bad": None}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("name: </script><script>window.hacked = 1</script>\n")
    count = len(Texts.everything)
    hostile = torch.arange(100, 100 + count).repeat_interleave(2)
    for step in range(1, steps + 1):
        responses = torch.stack([hostile, torch.full_like(hostile, 4)], dim=1)
        score = torch.zeros(2 * count, 2)
        score[:, 1] = torch.arange(2 * count) / 10 + step
        columns = {
            "prompts": hostile[:, None],
            "responses": responses,
            "attention_mask": torch.ones(2 * count, 3),
            "response_mask": torch.ones(2 * count, 2),
            "truncated": torch.zeros(2 * count, dtype=torch.bool),
            "token_level_scores": score,
            "rollout_log_probs": torch.full((2 * count, 2), -1.0),
            "old_log_probs": torch.full((2 * count, 2), -1.25),
            "update_log_probs": torch.full((2 * count, 2), -1.5),
            "advantages": torch.tensor([[1.0, -0.5]]).repeat(2 * count, 1),
        }
        names = {
            "uid": [f"{step}-{row // 2}" for row in range(2 * count)],
            "data_source": [HOSTILE[0]] * 2 * count,
            "reward_model": [{"ground_truth": HOSTILE[2]}] * 2 * count,
        }
        batch = DataProto.from_dict(columns, names)
        write_table(folder / "rollouts" / f"step_{step:06d}.parquet", samples_table(batch, Texts()))
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("page") / "<b>run & </script>".replace("/", "\u2215"))


@pytest.fixture(scope="module")
def server(run_dir):
    with PageServer([RunFiles(run_dir), RunFiles(run_dir)], Address("127.0.0.1", 0, TOKEN)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def serving(folder: Path) -> Generator[PageServer]:
    with PageServer([RunFiles(folder)], Address("127.0.0.1", 0, TOKEN)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    headers = {"Cookie": f"{server.cookie}={TOKEN}"} | headers
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_a_browser_that_leaves_in_the_midst_of_a_request_is_no_error(server, monkeypatch, capsys):
    handled, handle = threading.Event(), server.handle_error

    def record(*arguments):
        handle(*arguments)
        handled.set()

    monkeypatch.setattr(server, "handle_error", record)
    with socket.create_connection(server.server_address[:2]) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes by a reset
    assert handled.wait(60)
    assert capsys.readouterr().err == ""
    assert get(server, "/api/runs")[0] == 200


def test_a_run_is_served_before_its_first_step(tmp_path, capsys):
    assert main(["view", "--web", str(tmp_path)]) == 2  # no run at all
    assert mentions(capsys.readouterr().err, str(tmp_path), "trainer.default_local_dir")
    (tmp_path / ".lock").touch()
    with pytest.raises(DataError):
        RunFiles(tmp_path)  # there is nothing to report
    run = RunFiles(tmp_path, may_be_new=True)
    assert (run.summary()["last"], run.metrics()["steps"], run.validation()) == (-1, [], [])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    assert (run.summary()["last"], run.metrics()["steps"]) == (1, [1])
    assert run.summary()["panels"]


def test_a_page_for_all_addresses_names_one_that_others_reach(run_dir):
    with PageServer([RunFiles(run_dir)], Address("0.0.0.0", 0, TOKEN)) as server:
        address = server.address
        assert url_of(server) == f"http://127.0.0.1:{address.port}/?token={TOKEN}"
        assert address.url_outside not in (None, address.url, f"http://0.0.0.0:{address.port}")
        assert Address("0.0.0.0", 0).refusal(urlsplit(address.url_outside).netloc, []) is None
    with PageServer([RunFiles(run_dir)], Address("127.0.0.1", 0, TOKEN)) as server:
        assert server.address.url_outside is None


def test_samples_are_found_by_text_row_and_prompt(run_dir):
    run = RunFiles(run_dir)
    found = run.columns("rollouts", 2)
    assert found["rows"] == len(found["length"]) == 2 * len(Texts.everything)
    assert dict(found["columns"])["score"][:2] == [2.0, 2.1]
    assert run.search("rollouts", 2, "JavaScript:TOP") == [8, 9]
    [record] = run.rows("rollouts", 2, [5], tokens=True)
    assert record["prompt"] == HOSTILE[2]
    assert record["tokens"]["texts"] == [HOSTILE[2], "a"]
    assert dict(record["tokens"]["numbers"])["advantages"] == [1.0, -0.5]
    assert [(one["step"], one["row"]) for one in run.history("rollouts", HOSTILE[2])] == [
        (step, row) for step in (1, 2, 3) for row in (4, 5)
    ]
    with pytest.raises(DataError, match="no row 99"):
        run.rows("rollouts", 2, [99])
    with pytest.raises(DataError, match="no such samples"):
        run.columns("rollouts", 7)


def test_metrics_are_read_again_when_the_run_has_written(tmp_path):
    run = RunFiles(write_run(tmp_path / "run"))
    assert run.metrics()["steps"] == [1, 2, 3]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "bad": null}\n{"step": 5, "ba')
    new = run.metrics(after=3)
    assert (new["last"], new["steps"]) == (4, [4])
    assert dict(zip(new["names"], new["values"], strict=True))["bad"] == [None]


def test_a_run_says_where_it_stands(tmp_path):
    def stands(step: int, *starts: int) -> dict:
        lines = [{"step": at, "time/from_scratch": 10.0 * at} for at in range(1, step + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lines = [json.dumps({"step": start, "steps": 40}) + "\n" for start in starts]
        (tmp_path / "machine.jsonl").write_text("".join(lines))
        return RunFiles(tmp_path).summary()

    assert stands(12)["state"]["text"] == "step 12"  # of an earlier version
    assert stands(12, 0)["state"]["text"] == "died at step 12 of 40, nothing saved"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert stands(12, 0)["state"]["text"] == "died at step 12 of 40, step 10 saved"
    assert stands(10, 0)["state"]["text"] == "stopped at step 10 of 40, saved"
    assert stands(9, 0)["state"]["text"] == "stopped at step 10 of 40, saved"
    assert stands(40, 0)["state"]["text"] == "finished, 40 steps"
    with FileLock(tmp_path / ".lock"):
        found = stands(12, 0)
        assert found["state"] == {"text": "running, step 12 of 40", "of": 40}
    assert stands(30, 0, 10, 25, 20)["resumed"] == [10, 20]  # from 20 on, what followed 25 was replaced


@pytest.mark.slow
def test_a_browser_names_noise_and_the_time_left(browser, tmp_path):
    (tmp_path / "validation").mkdir()
    for step, value in ((0, 0.2), (10, 0.62), (20, 0.6)):
        score = {"value": value, "low": value - 0.05, "high": value + 0.05}
        report = {"n": 1, "sources": {"sums": {"scores": {"mean@1": score}}}}
        (tmp_path / "validation" / f"step_{step:06d}.json").write_text(json.dumps(report))
    lines = [{"step": step, "time/from_scratch": 3600.0 * step} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "machine.jsonl").write_text('{"step": 0, "steps": 40}\n')
    with FileLock(tmp_path / ".lock"), serving(tmp_path) as server:
        browser.open(f"{url_of(server)}#validation")
        browser.until("document.body.innerText.includes('beyond noise')")
        text = browser.text()
        assert mentions(text, "Last 0.600 at step 20; first 0.200 at step 0: the last is +0.400 from it")
        assert mentions(text, "best 0.620 at step 10: no difference beyond noise")
        assert mentions(text, "running, step 20 of 40, about 20 h left")
        assert browser.errors() == []


def test_a_browser_draws_intervals_resumes_and_zeros(browser, tmp_path):
    lines = [{"step": step, "critic/score/mean": 0.0, "val/test_score/a": 0.5} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "machine.jsonl").write_text('{"step": 0, "steps": 4}\n{"step": 2, "steps": 4}\n')
    (tmp_path / "validation").mkdir()
    report = f'{{"n": 1, "sources": {{"a": {{"scores": {{"mean@1": {SCORE}}}}}}}}}'
    (tmp_path / "validation" / "step_000002.json").write_text(report)
    with serving(tmp_path) as server:
        browser.open(url_of(server))
        browser.until("drawn.size === 2")
        assert "dashed: where a run was resumed" in browser.text()
        assert "95 % interval" in browser.text()
        plots = "return [...drawn].map((plot) => [plot.scales.y.min, plot.scales.y.max, plot.data.length])"
        reward, validation = browser.run(plots)
        assert reward == [0, 1, 2]
        assert validation[0] < 0.25
        assert validation[1:] == [pytest.approx(0.8, abs=0.1), 4]  # with both ends of the interval
        assert browser.errors() == []


def test_a_browser_shows_names_of_one_number_once(browser, tmp_path):
    lines = [
        {"step": step, "critic/score/mean": step / 4, "objective/scores": step / 4} for step in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(tmp_path) as server:
        browser.open(url_of(server))
        script = (
            "curveSettings.find = arguments[0]; return panelsOf(state.runs).map((box) => box.textContent)"
        )
        browser.until("drawn.size")
        [panel] = browser.run(script, "score")
        assert panel.startswith("critic/score/mean")
        [panel] = browser.run(script, "objective/scores")
        assert panel.startswith("objective/scores")


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/static/../files.py", "/static/%2e%2e/files.py", "/static/..%2ffiles.py",
        "/static/%252e%252e/files.py", "/static/", "/static/..\\files.py", "//etc/passwd", "/config.yaml",
        "/api/../config.yaml", "/api/rows/../../x", "/static/uPlot.LICENSE%00.js", "/api/__class__",
        "/api/columns?kind=..&step=1", "/api/columns?kind=%2e%2e%2frollouts&step=1",
        "/api/columns?kind=/etc&step=1",
    ],
)  # fmt: skip
def test_no_other_path_is_served(server, path):
    assert get(server, path)[0] == 404


@pytest.mark.parametrize(
    "query", ["step=../1", "step=1e3", "step=", "run=2&step=1", "run=-1&step=1", "step=%EF%BC%91"]
)
def test_a_parameter_that_is_no_number_of_it_is_refused(server, query):
    assert get(server, f"/api/columns?kind=rollouts&{query}")[0] == 400


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    folder = write_run(tmp_path / "run")
    secret = write_run(tmp_path / "other") / "rollouts" / "step_000001.parquet"
    (folder / "rollouts" / "step_000004.parquet").symlink_to(secret)
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to("/etc/passwd")
    run = RunFiles(folder)
    assert run.facts()["config"] == ""
    with pytest.raises(DataError, match="leads outside the run folder"):
        run.columns("rollouts", 4)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:80", 200), ("evil.example", 403),
        ("evil.example:8390", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("", 403), ("[", 403),
    ],
)  # fmt: skip
def test_without_a_token_a_name_that_is_not_this_machines_is_refused(server, monkeypatch, host, status):
    monkeypatch.setattr(server.address, "token", None)
    assert get(server, "/", Host=host)[0] == status


@pytest.mark.parametrize(
    ("path", "cookie"),
    [
        ("/", ""), ("/?token=", ""), ("/?token=0123456789abcde", ""), ("/?token=%C3%A9", ""),
        ("/?Token=" + TOKEN, ""), ("/", "\xe9=\xe9"),
        ("/static/main.js", ""), ("/api/runs", ""), ("/api/facts?run=0", ""), ("/nothing", ""),
        ("/", "{name}="), ("/", "{name}=0"), ("/", "x{name}=" + TOKEN), ("/", "strop=" + TOKEN),
    ],
)  # fmt: skip
def test_a_request_without_the_token_gets_one_line(server, path, cookie):
    status, body, headers = get(server, path, Cookie=cookie.format(name=server.cookie))
    assert status == 401
    assert list(json.loads(body)) == ["error"]
    assert b"\n" not in body
    assert "Set-Cookie" not in headers


def test_pages_of_two_machines_behind_one_name_have_cookies_of_their_own(server, monkeypatch):
    """Ports are forwarded by ssh: both are localhost to the browser, and the same port to themselves."""
    before = server.cookie
    monkeypatch.setattr(server.address, "token", TOKEN[::-1])
    assert server.cookie != before


def test_the_first_request_with_the_token_sets_the_cookie(server):
    status, _, headers = get(server, f"/?token={TOKEN}", Cookie="")
    assert status == 200
    cookie, *settings = headers["Set-Cookie"].split("; ")
    assert set(settings) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert get(server, "/api/runs", Cookie=f"other=1; {cookie}")[0] == 200
    assert get(server, f"/api/runs?token={TOKEN}", Cookie="")[0] == 200


def test_the_command_prints_the_address_with_a_new_token(run_dir, tmp_path):
    addresses = []
    for options in ([], [], ["--no-token"]):
        command = [sys.executable, "-m", "strop", "view", str(run_dir), "--web", "--port", "0", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                url = urlsplit(process.stdout.readline().split()[0])
                addresses.append(url.query)
                for path, status in (("/", 401 if url.query else 200), (f"/?{url.query}", 200)):
                    connection = http.client.HTTPConnection(url.netloc, timeout=60)
                    connection.request("GET", path)
                    assert connection.getresponse().status == status
                    connection.close()
            finally:
                process.kill()
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"token=\w{32}", query) for query in addresses[:2])
    assert addresses[2] == ""


def test_scripts_come_from_the_server_only(server):
    _, body, headers = get(server, "/")
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert b"https://" not in body
    names = re.findall(rb'(?:src|href)="(/static/[^"]+)"', body)
    assert any(name.endswith(b".js") for name in names)
    for name in names:
        status, script, _ = get(server, name.decode())
        assert status == 200
        # Data becomes text nodes: nothing that parses HTML or code is in the page's scripts.
        if b"uPlot" not in name:
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script)


def test_the_report_is_one_file_from_which_no_text_breaks_out(run_dir, tmp_path, capsys):
    out = tmp_path / "run.html"
    assert main(["report", str(run_dir), "-o", str(out), "--steps", "2", "--samples", "6"]) == 0
    assert f"{out.stat().st_size:,} bytes" in capsys.readouterr().out
    text = out.read_text()
    assert "hacked" not in text
    assert not re.search(r'(src|href)="(?!data:,)', text)
    [packed] = re.findall(r'id="data">([A-Za-z0-9+/=]+)</script>', text)
    [run] = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert [step for step, _ in run["samples"]["rollouts"]] == [1, 3]
    assert [record["row"] for record in run["samples"]["rollouts"][0][1]["records"]] == list(range(6))


def test_the_report_has_no_credential(tmp_path, monkeypatch):
    config = {"model": {"revision": "3f9a1c7be2d84f60a5b91c3d7e8f20416a5b3c2d"}, "apiKeys": ["Swordfish"]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    monkeypatch.setattr("sys.argv", ["strop", "train", "--api-key", "Swordfish", "n=4"])
    record_start(tmp_path, step=0, steps=4)
    assert "Swordfish" not in (tmp_path / "machine.jsonl").read_text()
    start = {"command": ["strop", "train", "password=Swordfish"]}  # as earlier versions wrote it
    (tmp_path / "machine.jsonl").write_text(json.dumps(start) + "\n")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "run.html"), "--samples", "0"]) == 0
    [packed] = re.findall(r'id="data">([A-Za-z0-9+/=]+)</script>', (tmp_path / "run.html").read_text())
    shown = gzip.decompress(base64.b64decode(packed)).decode()
    assert "Swordfish" not in shown
    assert config["model"]["revision"] in shown
    plain = "a:   1  # kept as it is\n"
    (tmp_path / "config.yaml").write_text(plain)
    assert RunFiles(tmp_path).facts()["config"] == plain


SCORE = '{"value": 0.5, "low": 0.25, "high": 0.75}'
DAMAGED = [
    "[1, 2]", "3", "null", '"text"', '{"n": 1', "{}", '{"sources": [1]}', '{"sources": {"a": 1}}',
    '{"sources": {"a": {"scores": [1]}}}', '{"sources": {"a": {"scores": {"mean@1": 0.5}}}}',
    '{"sources": {"a": {"scores": {"mean@1": {"value": NaN, "low": 1e999, "high": -Infinity}}}}}',
    "[" * 5000, "\x00", '{"sources": {"a": ' * 400,
]  # fmt: skip


def damaged_run(folder: Path) -> Path:
    write_run(folder)
    (folder / "validation").mkdir()
    for step, text in enumerate(DAMAGED, start=1):
        (folder / "validation" / f"step_{step:06d}.json").write_text(text)
    (folder / "validation" / "step_000090.json").write_bytes(b"\xff\xfe")
    whole = f'{{"n": 1, "sources": {{"sums": {{"scores": {{"mean@1": {SCORE}}}, "mean_length": NaN}}}}}}'
    (folder / "validation" / "step_000099.json").write_text(whole)
    start = '{"started": "now", "cores": NaN, "memory_gib": 1e999, "gpus": "one", "command": "strop train"}'
    (folder / "machine.jsonl").write_text("\n".join([*DAMAGED, start, start[:20]]))
    return folder


def test_damaged_files_leave_the_rest_of_the_page(tmp_path, capsys, monkeypatch):
    folder = damaged_run(tmp_path / "run")
    with serving(folder) as server:
        status, body, _ = get(server, "/api/validation?run=0")
        assert status == 200
        whole = [report for report in json.loads(body) if report["sources"].get("sums")]
        assert [(report["step"], report["sources"]["sums"]["mean_length"]) for report in whole] == [
            (99, None)
        ]
        status, body, _ = get(server, "/api/facts?run=0")
        assert status == 200
        assert any(start.get("command") == "strop train" for start in json.loads(body)["starts"])
        pq.write_table(
            pa.table({"score": ["a"], "response_mask": ["b"]}), folder / "rollouts/step_000001.parquet"
        )
        status, body, _ = get(server, "/api/columns?run=0&kind=rollouts&step=1")
        assert status == 404
        assert "step_000001.parquet" in json.loads(body)["error"]
        monkeypatch.setattr(RunFiles, "validation", lambda run: {"score": math.nan})
        status, body, _ = get(server, "/api/validation?run=0")
        assert status == 500
        assert "ValueError" in json.loads(body)["error"]
    monkeypatch.undo()
    assert main(["report", str(folder), "-o", str(tmp_path / "run.html"), "--samples", "0"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_browser_shows_what_damaged_files_leave(browser, tmp_path):
    with serving(damaged_run(tmp_path / "run")) as server:
        browser.open(f"{url_of(server)}#validation")
        browser.until("document.body.innerText.includes('0.500')")
        browser.open(f"{url_of(server)}#run")
        browser.until("document.body.innerText.includes('strop train')")
        assert browser.errors() == []


def test_several_runs_need_the_page(run_dir, capsys):
    assert main(["view", str(run_dir), str(run_dir)]) == 2
    assert "--web" in capsys.readouterr().err


@pytest.fixture
def browser():
    if not (CHROMIUM and DRIVER):
        pytest.skip(
            "NOT TESTED IN A BROWSER: chromium, chromedriver missing (apt-get install chromium-driver)"
        )
    with Browser(width=390, height=800) as browser:
        yield browser


def test_a_browser_shows_hostile_texts_as_text(server, browser, run_dir, tmp_path):
    main(["report", str(run_dir), "-o", str(tmp_path / "run.html"), "--samples", "100"])
    for url in (url_of(server), (tmp_path / "run.html").as_uri()):
        browser.open(f"{url}#samples")
        browser.until("document.querySelectorAll('.list summary').length === 16")  # one line a prompt
        browser.run("document.querySelectorAll('.list summary').forEach((line) => line.click())")
        browser.until("document.querySelectorAll('.list details a .response').length === 32")
        shown = browser.text()
        for text in HOSTILE:
            assert re.sub(r"\s+", " ", text) in re.sub(r"\s+", " ", shown)
        assert all(number in shown for number in INVISIBLE.values())
        browser.open(f"{url}#samples?run=0&kind=rollouts&step=3&row=4&show=group")
        browser.until("document.querySelectorAll('.card').length === 2")
        assert browser.run("return document.querySelector('.token').textContent") == HOSTILE[2]
        browser.hover(".token")
        tip = browser.until(
            "!document.getElementById('tip').hidden && document.getElementById('tip').innerText"
        )
        assert re.search(r"ratio new / old\s+0\.77880", tip)  # exp(-1.5 + 1.25)
        assert re.search(r"trainer − sampler\s+-0\.25", tip)
        browser.open(f"{url}#samples?run=0&kind=rollouts&step=3&row=4&show=steps")
        browser.until("document.querySelectorAll('.list li').length === 6")
        browser.open(f"{url}#run")
        browser.until("document.querySelector('.config')")
        browser.open(f"{url}#curves")
        browser.until("document.querySelectorAll('.uplot canvas').length > 0")
        assert browser.run("return window.hacked === undefined")
        assert browser.run("return document.documentElement.scrollWidth <= 390")  # as wide as a phone
        assert browser.errors() == []


def test_a_browser_shows_a_session_branch_by_branch_with_shared_tokens_folded(browser, tmp_path):
    calls = [Call(PROMPT, [], [4, 5]), Call(NOTHING, [6], [7, 8]), Call(0, [9], [10]), Call(0, [9], [11])]
    row, run = row_of(calls), write_run(tmp_path, steps=1)
    columns = {
        "prompts": torch.tensor([[3]]),
        "responses": torch.tensor([row.ids]),
        "attention_mask": torch.ones(1, 1 + len(row.ids)),
        "response_mask": torch.tensor([row.sampled]).float(),
        "follows": torch.tensor([row.follows], dtype=torch.int32),
        "advantages": torch.arange(-4.0, 5.0)[None],
    }
    path = run / "rollouts" / "step_000001.parquet"
    write_table(path, samples_table(DataProto.from_dict(columns, {"uid": ["a"]}), Letters()))
    tokens = "(box) => [...box.querySelectorAll('.token')].map((token) => token.at)"
    with serving(run) as server:
        browser.open(f"{url_of(server)}#samples?row=0")
        browser.until("document.querySelectorAll('.branches > li').length")
        shown = browser.run(f"return [...document.querySelectorAll('.branches > li')].map({tokens})")
        assert shown == [[0, 1, 5, 6], [7, 8], [2, 3, 4]]
        assert mentions(browser.text(), "2 tokens of an earlier branch", "with a context of its own")
        browser.run("document.querySelector('.branches summary').click()")
        browser.until("document.querySelectorAll('.branches details .token').length === 2")
        browser.hover(".branches li:last-child .token:last-child")
        browser.until("document.getElementById('tip').textContent.includes('token 5 of 9')")
        browser.screenshot(tmp_path / "branches.png")
        assert browser.errors() == []


@pytest.mark.parametrize(("rewards", "shown"), [([0.5, -1], ["0.500", "-1"]), ([2], ["2"]), ([], [])])
def test_turns_show_their_rewards(server, browser, rewards, shown):
    browser.open(f"{url_of(server)}#samples")
    browser.until("document.querySelectorAll('.list li').length === 16")
    turns = [{"text": text, "calls": [], "answers": []} for text in "ab"]
    sample = {"conversation": json.dumps({"turns": turns, **({"rewards": rewards} if rewards else {})})}
    script = "return [...turnsOf(arguments[0]).querySelectorAll('li')].map((turn) => turn.textContent)"
    found = browser.run(script, sample)
    expected = [f"{text} reward {reward}" for text, reward in zip("ab"[2 - len(shown) :], shown, strict=True)]
    assert found == ["a", "b"][: 2 - len(shown)] + expected


def test_a_filter_by_a_source_that_a_step_does_not_have_ends(server, browser):
    browser.open(f"{url_of(server)}#samples")
    browser.until("document.querySelectorAll('.list li').length === 16")
    browser.run("list.source = 'of another step'; document.querySelector('.list').id = 'before'")
    browser.run("document.querySelector('[aria-label=\"step before\"]').click()")
    browser.until("document.querySelector('.list:not(#before)')")
    assert "step=2" in browser.run("return location.hash")
    assert browser.run("return document.querySelectorAll('.list li').length") == 16
    assert browser.errors() == []


def test_bars_of_a_histogram_of_lengths_hold_equally_many_of_them(server, browser):
    browser.open(f"{url_of(server)}#samples")
    browser.until("document.querySelectorAll('.list li').length === 16")
    script = (
        "const bars = [...histogram('', arguments[0]).querySelectorAll('rect')];"
        "return bars.map((bar) => bar.textContent)"
    )
    assert browser.run(script, [0, 1, 1]) == ["0 to 0: 1", "1 to 1: 2"]
    counts = [int(bar.rpartition(" ")[2]) for bar in browser.run(script, list(range(50, 101)))]
    assert counts == [2] * 25 + [1]


def test_token_texts_that_cannot_be_read_leave_the_ids(run_dir, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    path = folder / "rollouts" / "step_000002.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({TOKEN_TEXTS: b"{}"}), path)
    [record] = RunFiles(folder).rows("rollouts", 2, [5], tokens=True)
    assert record["tokens"]["texts"] == [None, None]


def test_a_browser_follows_a_run_that_writes(browser, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    with PageServer([RunFiles(folder, may_be_new=True)], Address("127.0.0.1", 0, TOKEN)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.open(url_of(server))
            browser.until("document.getElementById('state').innerText === 'no step yet'")
            assert "Nothing is logged yet" in browser.text()
            write_run(folder)
            browser.until("document.getElementById('state').innerText.startsWith('step 3')")
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 4, "critic/score/mean": 0.9}\n')
            browser.until("document.getElementById('state').innerText.startsWith('step 4')")
            browser.until("[...drawn].some((plot) => plot.data[0].at(-1) === 4)")
            # a resume after step 2 has come to step 5 before the page reads again
            lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            now = [*(line for line in lines if line["step"] < 3)]
            now += [{"step": step, "critic/score/mean": 0.0625} for step in (3, 4, 5)]
            with open(folder / "machine.jsonl", "a") as file:
                file.write('{"step": 2, "steps": 40, "started": "later"}\n')
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in now))
            browser.until("[...drawn].some((plot) => plot.data[0].at(-1) === 5)")
            assert browser.run(
                "return [...drawn].filter((plot) => plot.data[0].at(-1) === 5)"
                ".some((plot) => plot.data.some((line) => String(line.slice(-3)) === '0.0625,0.0625,0.0625'))"
            )
            server.address.token = "another"  # as after a restart
            browser.until("document.getElementById('state').innerText.includes('token')")
        finally:
            server.shutdown()
            thread.join()


def test_a_report_replaces_no_file_that_nobody_named(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.html").write_text("another's")
    options = ["report", str(run_dir), "--steps", "1", "--samples", "1"]
    assert main(options) == 2
    assert "run.html exists already" in capsys.readouterr().err
    assert (tmp_path / "run.html").read_text() == "another's"
    assert main([*options, "--out", "run.html"]) == 0
    (tmp_path / "run.html").unlink()
    assert main(options) == 0
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")

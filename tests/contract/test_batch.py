"""A file of requests is answered line by line, as the server would answer; a run that was cut off is taken up."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolwright_engine.cli.main import main
from poolwright_engine.offline.batch import Line, read_requests
from support.engine_process import start_engine
from support.tiny_llama import write_tiny_llama

SMALL = ["--cpu-threads", "1", "--kv-cache-mebibytes", "8", "--served-model-name", "tiny"]
ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def line(custom_id: str, url: str = "/v1/completions", **changes: Any) -> dict[str, Any]:
    body = {**(CHAT if "chat" in url else ASKED), **changes}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(file: Path, *lines: object) -> Path:
    file.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return file


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def batch(requests: Path, output: Path, model: Path, *options: str) -> int:
    return main(["batch", str(requests), str(output), "--model", str(model), *SMALL, *options])


def test_answers_are_the_servers(model: Path, tmp_path: Path) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        line("text"),
        "\n",
        line("chat", "/v1/chat/completions", logprobs=True),
        line("several", n=2, temperature=1, seed=5, logprobs=1),
        line("guided", guided_choice=["yes", "no"]),
    )
    output = tmp_path / "out.jsonl"
    assert batch(requests, output, model) == 0
    found = {answer["custom_id"]: answer for answer in answers(output)}
    assert set(found) == {"text", "chat", "several", "guided"}
    with start_engine(model, name="tiny", options=SMALL[:4]) as engine:
        engine.wait_ready()
        for asked in map(json.loads, filter(str.strip, requests.read_text().splitlines())):
            served = httpx.post(f"{engine.url}{asked['url']}", json=asked["body"]).json()
            answer = found[asked["custom_id"]]
            assert answer["error"] is None
            assert answer["id"].startswith("batch_req_")
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"]
            body = answer["response"]["body"]
            for ours, theirs in zip(body["choices"], served["choices"], strict=True):
                # Log probabilities may differ in their last digit: other requests were in the step.
                assert {**ours, "logprobs": None} == {**theirs, "logprobs": None}
                assert (ours["logprobs"] is None) == (theirs["logprobs"] is None)
            assert body["usage"]["completion_tokens"] == served["usage"]["completion_tokens"]


def test_each_request_that_cannot_be_answered_says_why_and_the_others_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        line("good"),
        "nonsense\n",
        "[]\n",
        {**line("verb"), "method": "GET"},
        line("place", "/v1/embeddings"),
        {**line("body"), "body": "text"},
        line("stream", stream=True),
        line("good"),
        line("long", max_tokens=5000),
        line("name", model="other"),
        {**line("x"), "custom_id": 7},
    )
    output = tmp_path / "out.jsonl"
    assert batch(requests, output, model, "--cost-per-hour", "1") == 3
    found = answers(output)
    assert len(found) == 11
    errors = {answer["custom_id"] or answer["error"]["line"]: answer["error"] for answer in found if answer["error"]}
    assert set(errors) == {2, 3, 8, 11, "verb", "place", "body", "stream"}
    assert errors[2]["message"].startswith("line 2: not JSON")
    assert "stands on an earlier line too" in errors[8]["message"]
    assert "url must be one of /v1/completions, /v1/chat/completions" in errors["place"]["message"]
    refused = {a["custom_id"]: a["response"] for a in found if a["response"] and a["response"]["status_code"] != 200}
    assert {name: response["status_code"] for name, response in refused.items()} == {"long": 400, "name": 404}
    assert "max_model_len=512" in refused["long"]["body"]["error"]["message"]
    printed = capsys.readouterr().out
    assert "11, 10 of them failed" in printed
    assert "tokens per dollar" in printed


def test_what_is_answered_is_not_asked_again_and_half_a_line_is_cut_off(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write(tmp_path / "in.jsonl", line("a"), line("b"), "nonsense\n", line("c"))
    output = tmp_path / "out.jsonl"
    assert batch(requests, output, model) == 3
    whole = answers(output)
    kept = [answer for answer in whole if answer["custom_id"] != "b"]
    half = json.dumps(next(answer for answer in whole if answer["custom_id"] == "b"))[:40]
    write(output, *kept, half)
    assert batch(requests, output, model) == 3  # one is an error still
    assert "3 of 4 requests are answered already" in capsys.readouterr().out
    again = answers(output)
    assert again[:3] == kept
    assert again[3]["custom_id"] == "b"
    before = output.read_bytes()
    assert batch(requests, output, model) == 3
    assert output.read_bytes() == before


def test_a_whole_last_line_without_its_end_is_asked_again(model: Path, tmp_path: Path) -> None:
    requests, output = write(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    assert batch(requests, output, model) == 0
    output.write_bytes(output.read_bytes()[:-1])
    assert batch(requests, output, model) == 0
    assert [answer["custom_id"] for answer in answers(output)] == ["a"]


def test_a_killed_run_loses_no_answer(model: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", *[line(str(i), max_tokens=40) for i in range(30)])
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "poolwright_engine", "batch", str(requests), str(output)]
    command += ["--model", str(model), *SMALL, "--max-num-seqs", "2"]
    for ending in (signal.SIGKILL, signal.SIGINT):
        before = output.read_bytes() if output.exists() else b""
        with subprocess.Popen([*command, "--cpu-duty-percent", "30"], stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            while not output.exists() or output.read_bytes().count(b"\n") < before.count(b"\n") + 2:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(ending)
            assert process.wait(30) == (130 if ending is signal.SIGINT else -signal.SIGKILL)
        assert output.read_bytes().startswith(before)
    assert batch(requests, output, model) == 0
    found = answers(output)
    assert sorted(int(answer["custom_id"]) for answer in found) == list(range(30))
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in found}) == 1


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_says_at_once_what_it_does_and_what_is_left_when_it_is_cut_off(
    model: Path, tmp_path: Path, ending: signal.Signals, code: int
) -> None:
    requests = write(tmp_path / "in.jsonl", *(line(str(number), max_tokens=100) for number in range(200)))
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "poolwright_engine", "batch", str(requests), str(output), "--model", str(model)]
    with subprocess.Popen(
        [*command, *SMALL, "--max-num-seqs", "1", "--cpu-duty-percent", "30"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"Loading {model} to answer 200 requests\n"
        assert process.stderr.readline() == "Loaded; answering\n"
        deadline = time.monotonic() + 60
        while not output.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(ending)
        last = process.stderr.read().splitlines()[-1]
        assert process.wait(30) == code
    answered = len(answers(output))
    assert last == f"Cut off: {answered} of 200 requests are answered; the same command goes on from there"


def test_one_run_at_a_time_writes_a_file(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requests, output = write(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    held = os.open(output, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert batch(requests, output, model) == 2
    finally:
        os.close(held)
    assert "is being written by another process" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("requests", "output", "said"),
    [
        ("none.jsonl", "out.jsonl", "none.jsonl: No such file"),
        ("in.jsonl", "none/out.jsonl", "none/out.jsonl: No such file"),
        ("in.jsonl", "in.jsonl", "in.jsonl:1 is no answer of a batch; it is left alone"),
    ],
)
def test_files_that_cannot_be_used_are_named_and_left_alone(
    model: Path, tmp_path: Path, requests: str, output: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    written = write(tmp_path / "in.jsonl", line("a"))
    before = written.read_bytes()
    assert batch(tmp_path / requests, tmp_path / output, model) == 2
    assert said in capfd.readouterr().err
    assert written.read_bytes() == before


def test_a_price_must_be_one(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requests = write(tmp_path / "in.jsonl", line("a"))
    assert batch(requests, tmp_path / "out.jsonl", model, "--cost-per-hour", "0") == 2
    assert "--cost-per-hour" in capfd.readouterr().err


def test_requests_are_read_one_by_one(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", line("a"), *["\n"] * 3, line("b"))
    assert [(each.number, each.key) for each in read_requests(file)] == [(1, "a"), (5, "b")]
    assert Line(3, None, refused="x").key == 3

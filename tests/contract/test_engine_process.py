"""The engine as it is run: what its ports say from the first moment on, how it ends, and with which exit code."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from poolwright_engine.cli.main import main
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from poolwright_protocol.tickets import PromptMachine
from support.api_server import events
from support.engine_process import EngineProcess, start_engine
from support.hub_server import serving_hub
from support.tiny_llama import write_tiny_llama

SMALL = ("--cpu-threads", "1", "--kv-cache-mebibytes", "8")
ASKED = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    with start_engine(model, name="tiny", role=Role.PROMPT, role_epoch=3, options=SMALL) as engine:
        engine.wait_ready()
        yield engine


def test_api_admin_and_metrics_are_one_machine(engine: EngineProcess) -> None:
    with OpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model="tiny", prompt="abc", max_tokens=4, temperature=0, extra_headers={names.HEADER_MACHINE_UID: "uid-1"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
    state = engine.get_role()
    assert state.pod_uid == "uid-1"
    assert state.role is Role.PROMPT
    assert state.epoch >= 3
    text = httpx.get(f"{engine.url}/metrics").text
    labels = 'inference_pool="chat",inference_pool_namespace="default",machine_uid="uid-1"'
    assert f'poolwright_engine_role{{{labels},role="prompt"}} 1.0' in text
    assert f'poolwright_engine_role_epoch{{{labels},role="prompt"}} {state.epoch}.0' in text
    assert f'poolwright_engine_kv_transfers_total{{{labels},role="token",side="receive"}} 0.0' in text
    assert "_created" not in text


def test_a_role_set_is_a_role_read(engine: EngineProcess) -> None:
    before = engine.get_role()
    assert engine.put_role(Role.TOKEN, before.epoch + 1).role is Role.TOKEN
    assert engine.get_role().role is Role.TOKEN
    assert httpx.get(f"http://{engine.host}:{engine.admin_port}/admin/role").status_code == 401
    assert engine.put_role(Role.PROMPT, before.epoch + 2).role is Role.PROMPT


def test_the_log_says_where_it_serves_and_with_what(engine: EngineProcess) -> None:
    (line,) = [line for line in engine.log.splitlines() if " Serving " in line]
    assert f"url=http://{engine.host}:{engine.port}/v1 " in line
    facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
    assert {"kv_cache_tokens", "kv_cache", "max_num_batched_tokens", "max_step_seconds", "dtype", "cpu_threads"} < set(
        facts
    )
    assert " Product " not in engine.log


def test_a_kv_cache_larger_than_the_machine_is_one_line(model: Path) -> None:
    command = [sys.executable, "-m", "poolwright_engine", "check", str(model), "--log-level", "error"]
    ended = subprocess.run(
        [*command, "--kv-cache-mebibytes", str(10**9)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("poolwright-engine: --kv-cache-mebibytes, --swap-space: this machine has no ")
    assert ended.stderr.count("\n") == 1


def test_a_port_that_is_taken_ends_a_second_engine_with_one_line(engine: EngineProcess, model: Path) -> None:
    command = [sys.executable, "-m", "poolwright_engine", "serve", "--model", str(model), "--log-level", "error"]
    ended = subprocess.run(
        [*command, "--host", engine.host, "--port", str(engine.port)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"poolwright-engine: --port: cannot listen on {engine.host}:{engine.port}: ")
    assert ended.stderr.count("\n") == 1


def test_sigterm_lets_a_stream_finish(model: Path) -> None:
    slow = (*SMALL, "--cpu-duty-percent", "20")
    with start_engine(model, name="tiny", options=slow) as engine:
        engine.wait_listening()
        assert httpx.get(f"{engine.url}/ready").status_code in (200, 503)
        engine.wait_ready()
        asked = {**ASKED, "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            codes: list[int] = []
            ending = threading.Thread(target=lambda: codes.append(engine.terminate()))
            ending.start()
            assert sum(line.startswith("data: ") for line in lines) == 60  # 59 more tokens, and the end
        ending.join()
        assert codes == [0]


def test_a_second_signal_cuts_off_what_still_runs(model: Path) -> None:
    slow = (*SMALL, "--cpu-duty-percent", "5")
    with start_engine(model, name="tiny", options=slow) as engine:
        engine.wait_ready()
        asked = {**ASKED, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while httpx.get(f"{engine.url}/ready", timeout=5).status_code == 200:
                assert time.monotonic() < deadline
            engine.process.send_signal(signal.SIGTERM)
            told = events("\n".join(lines).strip())
        assert told[-1]["error"]["code"] == 503
        assert engine.process.wait(20) == 128 + signal.SIGTERM


def test_a_model_may_have_several_names_and_a_key(model: Path) -> None:
    """As vLLM: /v1 asks for the key, probes do not; answers carry the first name."""
    options = (*SMALL, "--served-model-name", "first", "second", "--api-key", "sesame", "--seed", "3")
    with start_engine(model, options=options) as engine:
        engine.wait_ready()
        asked = {**ASKED, "model": "second", "temperature": 1, "max_tokens": 16}
        url, key = f"{engine.url}/v1/completions", {"authorization": "Bearer sesame"}
        assert httpx.post(url, json=asked).status_code == 401
        assert httpx.post(url, json=asked, headers={"authorization": "Bearer other"}).status_code == 401
        answer = httpx.post(url, json=asked, headers=key)
        assert (answer.status_code, answer.json()["model"]) == (200, "first")
        names_listed = [card["id"] for card in httpx.get(f"{engine.url}/v1/models", headers=key).json()["data"]]
        assert names_listed == ["first", "second"]
        assert httpx.post(url, json={**asked, "model": "third"}, headers=key).status_code == 404
        assert httpx.get(f"{engine.url}/metrics").status_code == 200


def test_a_model_of_the_hub_is_fetched_while_the_port_answers(model: Path, tmp_path: Path) -> None:
    with serving_hub({"org/tiny": model}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        command = [sys.executable, "-m", "poolwright_engine"]
        known = {**os.environ, **environment}
        checked = subprocess.run(
            [*command, "check", "org/tiny", *SMALL, "--port", "0", "--api-key", "x"],
            env=known,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert checked.returncode == 0, checked.stderr
        assert "LlamaForCausalLM" in checked.stdout
        assert "served as               org/tiny" in checked.stdout
        assert "API keys                1, of which clients" in checked.stdout
        refused = subprocess.run(
            [*command, "serve", "org/none", "--port", "0", "--log-level", "error"],
            env=known,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert refused.returncode == 2
        assert refused.stderr.startswith("poolwright-engine: --model: the Hub has no repository org/none")
        assert refused.stderr.count("\n") == 1


def test_a_broken_model_ends_the_process_with_one_line_that_names_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    with start_engine(broken, options=(*SMALL, "--log-level", "error")) as engine:
        assert engine.process.wait(60) == 2
        assert engine.log.startswith("poolwright-engine: ")
        assert str(broken) in engine.log
        assert engine.log.count("\n") == 1


def test_a_prompt_computed_on_another_machine_gives_the_same_text(engine: EngineProcess, model: Path) -> None:
    asked = {**ASKED, "prompt": "a longer prompt, of several blocks of tokens", "max_tokens": 20}
    alone = httpx.post(f"{engine.url}/v1/completions", json=asked, timeout=30).json()["choices"][0]["text"]
    with start_engine(model, name="tiny", uid="uid-2", role=Role.TOKEN, options=SMALL) as token_machine:
        token_machine.wait_ready()
        ticket = PromptMachine(engine.uid, engine.host, engine.kv_port, time.time() + 60).encode(engine.pool_key)
        headers = {names.HEADER_PROMPT_MACHINE: ticket}
        url = f"{token_machine.url}/v1/completions"
        split = httpx.post(url, json=asked, headers=headers, timeout=30).json()["choices"][0]["text"]
        assert split == alone
        theirs = httpx.get(f"{token_machine.url}/metrics").text
        assert 'uid-2",role="token",side="receive"} 1.0' in theirs
        assert 'source="external_kv_transfer"} 44.0' in theirs
    assert "poolwright_engine_prefills_served_total{" in httpx.get(f"{engine.url}/metrics").text


_DYING = """
import sys
from poolwright_engine.cli import main as cli
from poolwright_engine.process import assembly
from support.scripted_runner import ScriptedRunner

load = assembly.load

def load_what_breaks(config):
    parts = load(config)
    runner = ScriptedRunner(num_blocks=64, block_size=config.block_size, step_seconds=0.01, fail_at=20)
    return assembly.Parts(runner, *[getattr(parts, name) for name in parts.__slots__[1:]])

assembly.load = load_what_breaks
sys.exit(cli.main(sys.argv[1:]))
"""


def test_when_the_engine_dies_clients_hear_it_and_the_process_ends(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(_DYING)
    tests = str(Path(__file__).parents[1])
    with start_engine(
        model, name="tiny", options=SMALL, program=(sys.executable, str(script)), environment={"PYTHONPATH": tests}
    ) as engine:
        engine.wait_ready()
        answer = httpx.post(f"{engine.url}/v1/completions", json={**ASKED, "max_tokens": 100, "stream": True})
        told = events(answer.text)
        assert told[-1]["error"]["code"] == 500
        assert len(told) > 1
        assert engine.process.wait(10) == 1
        assert engine.log.splitlines()[-1] == "poolwright-engine: the engine's loop died; its error is in the log"
        assert "the device broke" in engine.log


def test_generate_prints_what_the_server_would_answer(
    engine: EngineProcess, model: Path, capsys: pytest.CaptureFixture[str], one_torch_thread: None
) -> None:
    served = httpx.post(f"{engine.url}/v1/completions", json={**ASKED, "ignore_eos": False}).json()
    arguments = ["generate", "--model", str(model), "--prompt", "abc", "--raw", "--max-tokens", "8"]
    assert main([*arguments, "--kv-cache-mebibytes", "8", "--cpu-threads", "1"]) == 0
    assert capsys.readouterr().out == served["choices"][0]["text"] + "\n"

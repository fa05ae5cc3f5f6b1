"""An engine that stands still says so, tells its clients and ends; one that is only slow goes on. In real processes."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.api_server import events
from support.engine_process import EngineProcess, start_engine
from support.tiny_llama import write_tiny_llama

OPTIONS = ("--cpu-threads", "1", "--kv-cache-mebibytes", "8", "--stall-seconds", "1", "--stall-exit-seconds", "6")
ASKED = {"prompt": "abc", "max_tokens": 100, "temperature": 0, "ignore_eos": True}

# A device that does as it is told, in the place of the real one: the rest of the process is the real one.
_PROGRAM = """
import dataclasses, sys, threading
from poolwright_engine.cli import main as cli
from poolwright_engine.process import assembly
from poolwright_engine.scheduling import scheduler
from support.scripted_runner import ScriptedRunner

load = assembly.load
kind = sys.argv.pop(1)

class Runner(ScriptedRunner):
    def _run(self, step):
        if kind == "hangs" and step.number >= 5:
            threading.Event().wait()
        return super()._run(step)

def load_scripted(config, *others):
    parts = load(config, *others)
    parts.runner.close()
    step_seconds = 2.0 if kind == "slow" else 0.01
    return dataclasses.replace(parts, runner=Runner(num_blocks=64, block_size=16, step_seconds=step_seconds))

if kind == "starves":
    schedule = scheduler.Scheduler.schedule
    def starve(self, number, *others):
        return schedule(self, number, *others) if number < 5 else scheduler.Decision(None)
    scheduler.Scheduler.schedule = starve

assembly.load = load_scripted
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def engine_that(kind: str, model: Path, tmp_path: Path, options: tuple[str, ...] = OPTIONS) -> Iterator[EngineProcess]:
    script = tmp_path / "engine.py"
    script.write_text(_PROGRAM)
    tests = str(Path(__file__).parents[1])
    program = (sys.executable, str(script), kind)
    with start_engine(
        model, name="tiny", options=options, program=program, environment={"PYTHONPATH": tests}
    ) as engine:
        engine.wait_ready()
        yield engine


class Asking(threading.Thread):
    def __init__(self, engine: EngineProcess, stream: bool) -> None:
        super().__init__()
        self._engine, self._stream = engine, stream
        self.answer: httpx.Response | None = None

    def run(self) -> None:
        asked = {**ASKED, "stream": self._stream}
        self.answer = httpx.post(f"{self._engine.url}/v1/completions", json=asked, timeout=60)


@pytest.mark.parametrize("kind", ["hangs", "starves"])
def test_a_loop_that_stands_still_is_unready_then_tells_everyone_and_ends(
    kind: str, model: Path, tmp_path: Path
) -> None:
    with engine_that(kind, model, tmp_path) as engine:
        whole, stream = Asking(engine, stream=False), Asking(engine, stream=True)
        whole.start()
        stream.start()
        began = time.monotonic()
        while httpx.get(f"{engine.url}/ready", timeout=5).status_code == 200:
            assert time.monotonic() - began < 15
            time.sleep(0.05)
        assert httpx.get(f"{engine.url}/health", timeout=5).status_code == 200  # not yet beyond help
        assert engine.process.wait(60) == 1
        whole.join()
        stream.join()
        assert whole.answer is not None
        assert whole.answer.status_code == 500
        assert "made no progress" in whole.answer.json()["error"]["message"]
        assert stream.answer is not None
        begun = stream.answer.status_code == 200  # a stall before the first token is told like the other
        error = events(stream.answer.text)[-1]["error"] if begun else stream.answer.json()["error"]
        assert error["code"] == 500
        assert "made no progress" in error["message"]
        last = engine.log.splitlines()[-1]
        assert last.startswith("poolwright-engine: the engine failed: the engine made no progress for")


def test_a_slow_engine_becomes_ready_again_with_each_step(model: Path, tmp_path: Path) -> None:
    with engine_that("slow", model, tmp_path) as engine:
        asking = threading.Thread(
            target=httpx.post,
            args=(f"{engine.url}/v1/completions",),
            kwargs={"json": {**ASKED, "max_tokens": 4}, "timeout": 60},
        )
        asking.start()
        seen = []
        while asking.is_alive():
            seen.append(httpx.get(f"{engine.url}/ready", timeout=5).status_code)
            time.sleep(0.05)
        asking.join()
        assert set(seen) == {200, 503}
        assert 200 in seen[seen.index(503) :]
        assert engine.process.poll() is None
        assert engine.log.count("made no progress for") >= 2
        assert engine.log.count("makes progress again") >= 2
        assert engine.terminate() == 0


def test_a_loop_that_hangs_does_not_keep_a_process_that_was_told_to_end(model: Path, tmp_path: Path) -> None:
    options = (*OPTIONS[:-4], "--shutdown-timeout", "0.5")
    with engine_that("hangs", model, tmp_path, options) as engine:
        asking = Asking(engine, stream=True)
        asking.start()
        time.sleep(1)
        assert engine.terminate() == 1
        asking.join()
        assert asking.answer is not None
        assert "did not end within its shutdown timeout" in events(asking.answer.text)[-1]["error"]["message"]
        assert engine.log.splitlines()[-1] == "poolwright-engine: the engine did not end within its shutdown timeout"

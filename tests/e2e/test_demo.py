"""`poolwright demo` keeps the promises of its own summary, and ends cleanly when it is told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.tiny_llama import write_tiny_llama

POOLWRIGHT = str(Path(sys.executable).with_name("poolwright"))


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue  # it ended just now
    return found


@pytest.mark.long
@pytest.mark.model
@pytest.mark.timeout(1800)  # a slow machine gets longer phases
@pytest.mark.parametrize("arguments", [[], ["--compare"]], ids=["active", "compare"])
def test_demo_moves_machines_both_ways_and_keeps_every_promise(smollm2_path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [POOLWRIGHT, "demo", "--model", str(smollm2_path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "failed: 0" in done.stdout


@pytest.mark.timeout(180)
def test_demo_that_is_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    """Of a tiny model: it is told before it measures anything."""
    model = write_tiny_llama(tmp_path / "tiny", max_position_embeddings=1024)
    log = tmp_path / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [POOLWRIGHT, "demo", "--model", str(model)],
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        deadline = time.monotonic() + 120
        while "Engines ready" not in log.read_text() and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "Engines ready" in log.read_text()
        children = children_of(demo.pid)
        assert len(children) >= 4  # three engines and a router
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 128 + signal.SIGTERM
        assert "Traceback" not in log.read_text()
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_a_model_that_does_not_exist_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run([POOLWRIGHT, "demo", "--model", "/nowhere.gguf"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.strip().splitlines() == ["poolwright demo: the model /nowhere.gguf does not exist"]


def test_a_manifest_that_does_not_validate_is_refused_with_its_fields_and_exit_code_2(tmp_path: Path) -> None:
    manifest = tmp_path / "pool.yaml"
    manifest.write_text("apiVersion: poolwright.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: chat}\n")
    command = [POOLWRIGHT, "demo", "--file", str(manifest), "--model", str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.strip().splitlines() == ["spec: Field required"]

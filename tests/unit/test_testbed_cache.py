"""What is slow to build is built once, by one of all that ask, and is complete or absent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import cache

TESTS = Path(__file__).parent.parent
BUILD = """
import sys, time
from pathlib import Path
from testbed.cache import build_once
def build(folder):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "result").write_text("whole")
print((build_once("thing", "key", "building a thing", build) / "result").read_text())
"""


def _builder(home: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(home / "log"), str(seconds)],
        env={**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_two_runs_at_once_build_once(tmp_path: Path) -> None:
    with _builder(tmp_path, 0.5) as one, _builder(tmp_path, 0.5) as other:
        said = [one.communicate(timeout=60)[0], other.communicate(timeout=60)[0]]
    assert [text.split()[-1] for text in said] == ["whole", "whole"]
    assert (tmp_path / "log").read_text() == "built\n"


def test_killed_build_leaves_nothing_that_looks_built(tmp_path: Path) -> None:
    with _builder(tmp_path, 60) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "building\n"
        killed.send_signal(signal.SIGKILL)
    with _builder(tmp_path, 0) as next_one:
        assert next_one.communicate(timeout=60)[0].split()[-1] == "whole"
    assert (tmp_path / "log").read_text() == "built\nbuilt\n"


def test_old_versions_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for age, key in enumerate(("aaaa", "bbbb", "cccc")):
        folder = cache.build_once("thing", key, "building", lambda _: None, kept_versions=2)
        os.utime(folder, (1000 + age, 1000 + age))
    assert sorted(p.name for p in cache.cache_root().iterdir() if p.is_dir()) == ["thing-bbbb", "thing-cccc"]

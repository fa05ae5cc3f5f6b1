"""With CI=true a test of the real thing that would be skipped fails, and says why; elsewhere it is skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PROGRAM = """
import pytest

@pytest.fixture
def missing(): pytest.skip("no such program here")

@pytest.mark.cluster
def test_in_its_body(): pytest.skip("no bed here")

@pytest.mark.prometheus
def test_in_its_fixture(missing): pass

@pytest.mark.node
@pytest.mark.skip(reason="somebody turned it off")
def test_by_its_mark(): pass

def test_of_nothing_real(): pytest.skip("allowed")
"""


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed, 1 skipped, 2 errors"), ("", "4 skipped")])
def test_skip_of_the_real_thing_is_a_failure_only_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_some.py").write_text(PROGRAM)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  cluster: c\n  node: n\n  prometheus: p\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "testbed.plugin",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            "-p",
            "no:randomly",
            str(tmp_path),
        ],
        env={**os.environ, "CI": ci, "PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{outcome} in" in done.stdout, done.stdout
    for reason in ("no bed here", "no such program here", "somebody turned it off") if ci else ():
        assert f"CI=true allows no skipped test of the real thing: {reason}" in done.stdout.replace("Skipped: ", "")

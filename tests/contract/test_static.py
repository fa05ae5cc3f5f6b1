"""Formatting, style, types and import rules hold. What `make lint` and `make type` run, so that CI runs it too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]],
    ids=["format", "style", "types", "imports"],
)
def test_repository_passes(command: list[str]) -> None:
    program = BIN / command[0]
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Threads are told to spin briefly only where that is still heard and nobody said otherwise."""

import subprocess
import sys

import pytest

from poolwright_engine.process.openmp import SPINS_ALONE, SPINS_OF_A_POOL, spin_briefly
from poolwright_protocol import names

SCRIPT = """
import os, sys
from poolwright_engine.cli import main as cli
try:
    cli.main(["serve", "/nowhere"])
except SystemExit:
    pass
import torch
assert os.environ["GOMP_SPINCOUNT"] == sys.argv[1], os.environ["GOMP_SPINCOUNT"]
"""


@pytest.mark.parametrize(
    ("told", "spins"), [({}, SPINS_ALONE), ({names.ENV_ROLE: "mixed"}, SPINS_OF_A_POOL)], ids=["alone", "in a pool"]
)
def test_it_is_said_when_torch_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], spins: int
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = dict(told)
    assert spin_briefly(environment)
    assert environment == {**told, "GOMP_SPINCOUNT": str(spins)}


@pytest.mark.parametrize("setting", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = {setting: "x"}
    assert not spin_briefly(environment)
    assert environment == {setting: "x"}


def test_it_is_too_late_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    environment: dict[str, str] = {}
    assert not spin_briefly(environment)
    assert environment == {}


def test_the_command_line_says_it_before_it_loads_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SPINS_ALONE)], check=True, timeout=100, capture_output=True, env={}
    )

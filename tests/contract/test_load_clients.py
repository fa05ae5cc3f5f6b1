"""`vllm bench serve` and guidellm, as their makers ship them, load a real engine without one failed request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("smollm2_path")
def test_clients_that_nobody_here_wrote_get_every_answer(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH / "clients.py"), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(BENCH)})
    if "No client is installed" in done.stderr:
        pytest.skip("neither vllm nor guidellm is installed for the benches: `make bench-clients` does it")
    assert done.returncode == 0, done.stdout + done.stderr
    for client, found in json.loads(figures.read_text()).items():
        assert (found["completed"], found["failed"]) == (12, 0), client

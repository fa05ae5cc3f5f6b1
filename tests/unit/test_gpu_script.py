"""`make gpu` without a GPU: every section's code runs, through the references and with small sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = ("environment", "kernels", "races", "engine", "attention", "launches", "tiles", "model")


def gpu_script(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "__main__.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_runs_and_writes_what_it_found(tmp_path: Path, section: str) -> None:
    done = gpu_script("--device", "cpu", "--tiny", "--only", section, "--output", str(tmp_path))
    found = json.loads((tmp_path / f"{section}.json").read_text())
    assert done.returncode == 0, done.stdout + (tmp_path / f"{section}.log").read_text()
    assert found["state"] == "ok"
    assert found["entries"]
    assert done.stdout.startswith(f"{section:12} ok")


def test_without_a_gpu_it_fails_and_says_so(tmp_path: Path) -> None:
    done = gpu_script("--only", "environment", "--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "PyTorch finds no GPU" in done.stdout


def test_the_list_of_wheels_is_names_versions_and_purposes() -> None:
    lines = (ROOT / "bench" / "gpu-wheels.txt").read_text().splitlines()
    rows = [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]
    assert {"torch", "triton", "vllm", "flashinfer-python"} <= {pin.split("==")[0] for pin, _, _ in rows}
    assert all(len(pin.split("==")) == 2 and (digest == "-" or len(digest) == 64) for pin, digest, _ in rows)

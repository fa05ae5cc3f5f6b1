"""`make gpu` without a GPU: every section's code runs, through the references and with small sizes."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
import zipfile
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


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_script", ROOT / "bench" / "gpu" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, name: str, needs: str = "") -> Path:
    """Of one module without a line."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_listed_wheels_are_found_and_another_digest_ends_it(script: types.ModuleType, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "one_peer")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lines = f"# name\none-peer==1.0 {digest} peer of attention\nother==1.0 - used throughout\n"
    assert script.listed(tmp_path, lines) == [(wheel, "peer of attention")]
    with pytest.raises(SystemExit, match="its sha256 is not that of"):
        script.listed(tmp_path, lines.replace(digest, "0" * 64))


def test_a_wheel_that_lacks_its_needs_takes_nothing_from_the_others(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer is installed without them; what all else runs on is not, since it would hide what was there. Packages of
    this interpreter, which may be of an environment, stay in sight."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    wheels = tmp_path / "wheels"
    for folder in (wheels, tmp_path / "bench"):
        folder.mkdir()
    lines = "a_peer==1.0 - peer of attention\na_base==1.0 - used throughout\nplain==1.0 - used throughout\n"
    (tmp_path / "bench" / "gpu-wheels.txt").write_text(lines)
    for name, needs in (("a_peer", "nowhere_to_be_had"), ("a_base", "nowhere_to_be_had"), ("plain", "pytest")):
        write_wheel(wheels, name, needs)
    python = script.with_wheels(wheels, tmp_path)
    told = capsys.readouterr().out
    assert "a_base-1.0-py3-none-any.whl left out: ERROR" in told
    assert told.count("left out") == 1
    names = ("a_peer", "a_base", "plain", "pytest")
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(["a_peer", "plain", "pytest"])
    assert (
        script.installed(python, wheels / "plain-1.0-py3-none-any.whl", False, time.monotonic()) == "no time was left"
    )


def test_the_list_of_wheels_is_names_versions_and_purposes() -> None:
    lines = (ROOT / "bench" / "gpu-wheels.txt").read_text().splitlines()
    rows = [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]
    assert {"torch", "triton", "vllm", "flashinfer-python"} <= {pin.split("==")[0] for pin, _, _ in rows}
    assert all(len(pin.split("==")) == 2 and (digest == "-" or len(digest) == 64) for pin, digest, _ in rows)

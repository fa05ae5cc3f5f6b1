"""`make gpu`: all that only a GPU can show, in one command that reaches no network: `python bench/gpu [options]`.

Each section runs in a process of its own, within a time limit, and writes build/gpu/<section>.json as it finds things,
so that a section that fails or is cut off takes nothing from the others. `--device cpu --tiny` runs every section's
code through the references with small sizes: its numbers say nothing, but that the script runs.

This file is the parent: standard library only. Wheels are installed from `wheels/` where that folder is.
"""

import argparse
import hashlib
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {  # seconds
    "environment": 40,
    "kernels": 100,
    "races": 40,
    "engine": 60,
    "attention": 70,
    "launches": 30,
    "tiles": 40,
    "model": 90,
    "tests": 70,
}
TOTAL_SECONDS = 350  # with the installation of wheels
WHEELS_SECONDS = 120
CPU_PATIENCE = 4  # times as long where nothing is measured, on a machine that may be busy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    patience = CPU_PATIENCE if options.device == "cpu" else 1
    ends, failed = time.monotonic() + TOTAL_SECONDS * patience, []
    python = with_wheels(ROOT / "wheels", options.output) if (ROOT / "wheels").is_dir() else sys.executable
    for section in options.only:
        limit = min(SECTIONS[section] * patience, ends - time.monotonic())
        state, line, seconds = run(python, section, options, limit)
        print(f"{section:12} {state:8} {seconds:5.1f} s  {line}", flush=True)
        if state not in ("ok", "skipped"):
            failed.append(section)
    print(f"Results are in {options.output}" + (f"; not well: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def run(python: str, section: str, options: argparse.Namespace, limit_seconds: float) -> tuple[str, str, float]:
    """Its state, one line, and how long it took."""
    target = options.output / f"{section}.json"
    target.unlink(missing_ok=True)
    began = time.monotonic()
    if limit_seconds < 1:
        target.write_text(json.dumps({"section": section, "state": "skipped", "line": "no time was left"}))
        return "skipped", "no time was left", 0.0
    folders = [ROOT, *(ROOT / name for name in ("protocol", "operator", "engine_image", "kernels", "tests"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TRITON_INTERPRET": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    words = [
        python,
        "-m",
        "bench.gpu.section",
        section,
        str(target),
        options.device,
        "tiny" if options.tiny else "full",
    ]
    log = options.output / f"{section}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
    found: dict[str, Any] = {"section": section, "entries": []}
    if target.exists():
        found = json.loads(target.read_text())
    if code is None:
        found |= {"state": "cut off", "line": f"after {limit_seconds:.0f} s, {len(found['entries'])} entries"}
    elif code != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        found |= {"state": "failed", "line": lines[-1][:300] if lines else f"exit code {code}"}
    target.write_text(json.dumps(found, indent=1))
    return found["state"], found["line"], time.monotonic() - began


def with_wheels(folder: Path, output: Path) -> str:
    """The interpreter of an environment that has the listed wheels that are there, over the packages of this one. A
    wheel that cannot be installed, or not in time, takes nothing from the others."""
    wheels = listed(folder, (ROOT / "bench" / "gpu-wheels.txt").read_text())
    place = output / "venv"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        # Not as the system's packages: this interpreter may be of an environment itself, whose packages those are not.
        own = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
        (own / "beneath.pth").write_text("\n".join(site.getsitepackages()))
    ends = time.monotonic() + WHEELS_SECONDS
    for wheel, purpose in wheels:
        if failure := installed(str(python), wheel, purpose.startswith("peer"), ends):
            print(f"wheels       {wheel.name} left out: {failure}", flush=True)
    return str(python)


def listed(folder: Path, lines: str) -> list[tuple[Path, str]]:
    """What the list names and the folder has, with its purpose, in the order of the list. Exits where a digest is not
    the listed one."""
    wheels = []
    for line in lines.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pin, digest, purpose = line.split(maxsplit=2)
        name, version = pin.split("==")
        found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}[-+]*.whl"))
        if found and digest not in ("-", hashlib.sha256(found[-1].read_bytes()).hexdigest()):
            raise SystemExit(f"{found[-1].name}: its sha256 is not that of bench/gpu-wheels.txt")
        print(f"wheels       {pin}: {found[-1].name if found else 'not there'}", flush=True)
        wheels += [(wheel, purpose) for wheel in found[-1:]]
    return wheels


def installed(python: str, wheel: Path, is_peer: bool, ends: float) -> str:
    """With what it needs, such as CUDA's libraries, where all of that is there or lies beside; a peer else alone.
    Returns why not, or nothing."""
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheel.parent)]
    failure = "no time was left"
    for alone in ([], ["--no-deps"]) if is_peer else ([],):
        left = ends - time.monotonic()
        if left < 1:
            break
        try:
            subprocess.run([*install, *alone, str(wheel)], check=True, timeout=left, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            failure = error.stderr.strip()[-300:]
        except subprocess.TimeoutExpired:
            failure = "it took too long"
        else:
            return ""
    return failure


if __name__ == "__main__":
    sys.exit(main())

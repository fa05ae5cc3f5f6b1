"""Write the lock files from pyproject.toml: pinned versions with hashes and no download addresses.

`locks/dev.txt` is all that tests and demo need; `locks/control-plane.txt` and `locks/engine.txt` what the images hold.
PyTorch's PyPI build for Linux needs CUDA libraries of several GB that its CPU build does not, so those stand apart in
`locks/cuda.txt`, to be installed beside the others only where no CPU wheel of the pinned version is at hand. The CPU
wheel is listed by its sha256 beside the public ones.

    python scripts/lock.py [--find-links FOLDER]     # FOLDER may hold torch-…+cpu….whl; needs `uv`
"""

import argparse
import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
TORCH = "torch==2.13.0"
CUDA_ONLY = re.compile(r"^(nvidia-|cuda-)")
WITH_CUDA_OR_TESTS = re.compile(r"^triton==")  # in the lock of tests too: kernels compile without a GPU
HEADER = "# Written by scripts/lock.py. Do not edit.\n"

SETS = {
    "dev": [
        *("pyproject.toml", "--extra", "operator", "--extra", "router", "--extra", "engine", "--extra", "sim"),
        *("--group", "build", "--group", "lint", "--group", "test"),
    ],
    "control-plane": ["pyproject.toml", "--extra", "operator", "--extra", "router"],
    "engine": ["pyproject.toml", "--extra", "engine"],
    "build": ["--group", "build"],
}


def compile_pins(arguments: list[str], constraints: Path) -> dict[str, str]:
    """Package line → the whole pinned block with its hashes, in order."""
    command = [
        "uv", "pip", "compile", "--python-version", "3.11", "--generate-hashes",
        "--no-emit-index-url", "--no-header", "--no-annotate", "--quiet", "-c", str(constraints), *arguments,
    ]  # fmt: skip
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return {block.split("==")[0]: block for block in blocks if "==" in block}


def cpu_wheel_hashes(folder: Path | None) -> list[str]:
    """Of the wheels in the folder, else those that the present lock already lists apart (see the marker comment)."""
    if folder and (wheels := sorted(folder.glob("torch-2.13.0+cpu-*.whl"))):
        return [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    present = LOCKS / "dev.txt"
    return re.findall(r"^# cpu build: ([0-9a-f]{64})", present.read_text(), re.MULTILINE) if present.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find-links", type=Path)
    cpu_hashes = cpu_wheel_hashes(parser.parse_args().find_links)
    LOCKS.mkdir(exist_ok=True)
    constraints = LOCKS / ".constraints"
    constraints.write_text(TORCH + "\n")
    try:
        everything = compile_pins(SETS["dev"], constraints)
        constraints.write_text("".join(block.splitlines()[0].rstrip(" \\") + "\n" for block in everything.values()))
        for name, arguments in SETS.items():
            pins = everything if name == "dev" else compile_pins(arguments, constraints)
            if "torch" in pins and cpu_hashes:
                marks = "".join(f"# cpu build: {digest}\n" for digest in cpu_hashes)
                listed = "".join(f" \\\n    --hash=sha256:{digest}" for digest in cpu_hashes)
                pins["torch"] = marks + pins["torch"].rstrip("\n") + listed + "\n"
            kept = [block for block in pins.values() if not CUDA_ONLY.match(block)]
            if name != "dev":
                kept = [block for block in kept if not WITH_CUDA_OR_TESTS.match(block)]
            (LOCKS / f"{name}.txt").write_text(HEADER + "".join(kept))
        cuda = [block for block in everything.values() if CUDA_ONLY.match(block) or WITH_CUDA_OR_TESTS.match(block)]
        (LOCKS / "cuda.txt").write_text(HEADER + "".join(cuda))
    finally:
        constraints.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The tests marked `gpu`, run by pytest where that is installed."""

import importlib.util
import os
import subprocess
import sys

from bench.gpu.harness import Bench, Skipped


def run(bench: Bench) -> str:
    for name in ("pytest", "llguidance", "safetensors", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise Skipped(f"{name} is not installed")
    words = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "-m", "gpu", "tests/gpu"], capture_output=True, text=True, env=os.environ, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    print(done.stdout, done.stderr)
    # On a CPU all of them are skipped.
    bench.check("tests/gpu", done.returncode == 0 and ("passed" in last or not bench.is_cuda), said=last)
    return last

"""`bench/clients.py` says what it ran, and fails where it ran nothing or a request failed. The clients are played."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"

# Play a client: write what it would, where it was told to.
_VLLM = """
import json, sys
words = dict(zip(sys.argv, sys.argv[1:]))
count = int(words["--num-prompts"])
failed = {failed}
json.dump({{
    "completed": count - failed, "failed": failed, "total_output_tokens": 16 * count, "output_throughput": 20.004,
    "mean_ttft_ms": 1.0, "mean_tpot_ms": 2.0, "mean_itl_ms": 3.0, "errors": ["", "it broke"][:1 + bool(failed)],
}}, open(words["--result-dir"] + "/" + words["--result-filename"], "w"))
"""
_GUIDELLM = """
import json, sys
words = dict(zip(sys.argv, sys.argv[1:]))
options = dict(pair.split("=", 1) for word in sys.argv[2:] if "=" in word for pair in word.split(","))
names = ("output_tokens_per_second", "time_to_first_token_ms", "time_per_output_token_ms", "inter_token_latency_ms")
metrics = {{name: {{"successful": {{"mean": 4.0}}}} for name in names}}
metrics["request_totals"] = {{"successful": int(options["count"]) - {failed}, "errored": {failed}}}
json.dump({{"benchmarks": [{{"metrics": metrics}}]}}, open(options["path"], "w"))
"""


def install(cache: Path, name: str, program: str, failed: int = 0) -> None:
    path = cache / "poolwright" / "bench" / name / "bin" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\n" + program.format(failed=failed))
    path.chmod(0o755)


def run(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = ("--url", "http://127.0.0.1:1", "--model", "m", "--tokenizer", str(cache), "--prompts", "6", *words)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH / "clients.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_where_no_client_is_installed_it_fails_and_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert f"guidellm: not installed at {tmp_path}/poolwright/bench/guidellm/bin/guidellm" in done.stderr
    assert "nothing was run; --install makes" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("required", "code"), [((), 0), (("--require",), 1)])
def test_a_missing_client_is_named_and_left_out(tmp_path: Path, required: tuple[str, ...], code: int) -> None:
    install(tmp_path, "vllm", _VLLM)
    done = run(tmp_path, *required)
    assert "vllm bench serve: completed 6, failed 0" in done.stdout
    assert "guidellm: not installed at" in done.stderr
    assert done.returncode == code


def test_the_figures_are_the_clients(tmp_path: Path) -> None:
    install(tmp_path, "vllm", _VLLM)
    install(tmp_path, "guidellm", _GUIDELLM)
    done = run(tmp_path, "--require", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["vllm bench serve"] == {
        "completed": 6,
        "failed": 0,
        "output_tokens": 96,
        "output_tokens_per_second": 20.0,
        "mean_ttft_milliseconds": 1.0,
        "mean_tpot_milliseconds": 2.0,
        "mean_itl_milliseconds": 3.0,
    }
    assert (figures["guidellm"]["completed"], figures["guidellm"]["mean_ttft_milliseconds"]) == (6, 4.0)


@pytest.mark.parametrize(("name", "program"), [("vllm", _VLLM), ("guidellm", _GUIDELLM)])
def test_a_failed_request_fails_it(tmp_path: Path, name: str, program: str) -> None:
    install(tmp_path, name, program, failed=2)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "2 of 6 requests failed" in done.stderr

"""Load clients that nobody here wrote, against this engine: `vllm bench serve` and guidellm. A failed request fails it.

    make bench-clients            # installs what is missing first
    PYTHONPATH=bench python bench/clients.py [--install] [--url URL --model NAME --tokenizer FOLDER] [--prompts 12]
        [--concurrency 4] [--require] [--json FILE]

Each client runs from an environment of its own (`environments.py`); one that is not there is named and left out, with
--require is a failure, and with --install is made. Where none is there it fails, since nothing was shown. Without --url
an engine is started with the small demo model, and a keep-alive comment wherever a stream is silent for a twentieth of
a second, so that these clients meet many. The figures are the clients', by their own definitions: `vllm bench serve`
times the first chunk with choices, guidellm's time per output token includes the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments
import httpx

from poolwright.local.model import ensure_demo_model
from poolwright.local.processes import free_ports
from poolwright_engine.checkpoint.loader import load_model

INPUT_TOKENS, OUTPUT_TOKENS = 64, 16
LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    tokenizer: Path  # a folder as Hugging Face stores one


@dataclass(frozen=True)
class Load:
    prompts: int
    concurrency: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running engine or router")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--tokenizer", type=Path, help="folder with the model's tokenizer")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--install", action="store_true", help="make the environments that are missing: takes minutes")
    parser.add_argument("--require", action="store_true", help="a client that is not installed is a failure")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.url and not (options.model and options.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    clients = {"vllm bench serve": ("vllm", run_vllm), "guidellm": ("guidellm", run_guidellm)}
    if options.install:
        for environment, _ in clients.values():
            environments.python_of(environment)
    missing = []
    for client, (environment, _) in clients.items():
        if not program_of(environment).exists():
            print(f"{client}: not installed at {program_of(environment)}", file=sys.stderr)
            missing.append(client)
    if len(missing) == len(clients):
        print("No client is installed, so nothing was run; --install makes their environments", file=sys.stderr)
        return 1
    load, figures, failed = Load(options.prompts, options.concurrency), {}, bool(missing) and options.require
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        folder = Path(name)
        with target_of(options, folder) as target:
            for client, (environment, run) in clients.items():
                if client in missing:
                    continue
                (folder / environment).mkdir()
                found = run(program_of(environment), target, load, folder / environment)
                figures[client] = found
                print(f"{client}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
                if found["failed"] or found["completed"] != load.prompts:
                    print(f"{client}: {found['failed']} of {load.prompts} requests failed", file=sys.stderr)
                    failed = True
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(failed)


def program_of(environment: str) -> Path:
    """Where it is installed, the client's program bears its environment's name."""
    folder: Path = environments.cache() / environment / "bin"
    return folder / environment


def run_vllm(program: Path, target: Target, load: Load, folder: Path) -> dict[str, Any]:
    command = [
        str(program), "bench", "serve",
        "--backend", "openai",
        "--base-url", target.url,
        "--model", target.model,
        "--tokenizer", str(target.tokenizer),
        "--dataset-name", "random",
        "--random-input-len", str(INPUT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS),
        "--num-prompts", str(load.prompts),
        "--max-concurrency", str(load.concurrency),
        "--ignore-eos",
        "--seed", "0",
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--save-result",
        "--save-detailed",
        "--result-dir", str(folder),
        "--result-filename", "result.json",
    ]  # fmt: skip
    run_client(command, folder)
    result = json.loads((folder / "result.json").read_text())
    for error in {error.strip().splitlines()[-1] for error in result["errors"] if error.strip()}:
        print(f"vllm bench serve: {error}", file=sys.stderr)
    return {
        "completed": result["completed"],
        "failed": result.get("failed", load.prompts - result["completed"]),
        "output_tokens": result["total_output_tokens"],
        "output_tokens_per_second": round(result["output_throughput"], 2),
        "mean_ttft_milliseconds": round(result["mean_ttft_ms"], 1),
        "mean_tpot_milliseconds": round(result["mean_tpot_ms"], 1),
        "mean_itl_milliseconds": round(result["mean_itl_ms"], 1),
    }


def run_guidellm(program: Path, target: Target, load: Load, folder: Path) -> dict[str, Any]:
    output = folder / "result.json"
    command = [
        str(program), "run",
        "--backend", f"kind=openai_http,target={target.url},model={target.model}",
        "--profile", f"kind=concurrent,streams={load.concurrency}",
        "--constraint", f"kind=max_requests,count={load.prompts}",
        "--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={output}",
        "--disable-console-interactive",
    ]  # fmt: skip
    run_client(command, folder)
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    totals, metrics = benchmark["metrics"]["request_totals"], benchmark["metrics"]

    def mean(name: str) -> float:
        return round(float(metrics[name]["successful"]["mean"]), 2)

    return {
        "completed": totals["successful"],
        "failed": totals["errored"],
        "output_tokens_per_second": mean("output_tokens_per_second"),
        "mean_ttft_milliseconds": mean("time_to_first_token_ms"),
        "mean_tpot_milliseconds": mean("time_per_output_token_ms"),
        "mean_itl_milliseconds": mean("inter_token_latency_ms"),
    }


def run_client(command: list[str], folder: Path) -> None:
    """Its output is shown only where it fails. Raises SystemExit."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(Path.home())}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ended with {done.returncode}:\n{done.stdout[-4000:]}")


@contextmanager
def target_of(options: argparse.Namespace, folder: Path) -> Iterator[Target]:
    if options.url:
        yield Target(options.url.rstrip("/"), options.model, options.tokenizer.resolve())
        return
    path = ensure_demo_model()
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    read = load_model(path).tokenizer
    (tokenizer / "tokenizer.json").write_text(read.to_json())
    end = read.token_text(min(read.eos_ids))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "llama"}))
    port, admin_port, kv_port = free_ports(3)
    command = [
        sys.executable, "-m", "poolwright_engine", "serve", str(path),
        "--served-model-name", "demo",
        "--sse-keep-alive-interval", "0.05",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--admin-port", str(admin_port),
        "--kv-port", str(kv_port),
    ]  # fmt: skip
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_ready(f"http://127.0.0.1:{port}", process, folder / "engine.log")
            yield Target(f"http://127.0.0.1:{port}", "demo", tokenizer)
        finally:
            if process.poll() is not None:
                print((folder / "engine.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            process.terminate()
            process.wait(60)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"The engine did not become ready:\n{log.read_text(errors='replace')[-4000:]}")


if __name__ == "__main__":
    sys.exit(main())

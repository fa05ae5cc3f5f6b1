"""The engine against others on this CPU: the same weights, client, threads and budget, in turns, as ratios.

    PYTHONPATH=bench python bench/engine_vs.py [--pairs 5] [--dtypes float32 bfloat16]
        [--against vllm llamacpp openvino] [--threads 2] [--output build/bench/engine.json]

vLLM: `vllm bench serve` against both servers, 16 prompts of 128 random tokens and answers of 32 at a concurrency of 8,
and one stream. Each pair starts each server once, vLLM first in every second one; of vLLM's eager and compiled modes
the better of the first pair stays. llama.cpp (Q4_1): the same client, one stream, against weights in 8 and in 4 bits.
OpenVINO GenAI, which has no server: both in process, one stream and 8 prompts at once. Numbers of one run may be
compared with each other only. Nothing is asserted.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engine_floor import flags
from environments import VLLM_VERSION, python_of, smollm2_folder

from poolwright.local.model import ensure_demo_model
from poolwright.local.processes import free_ports

HOST = "127.0.0.1"
MODEL = "smollm2"
BUDGET = ("--max-model-len=2048", "--max-num-seqs=16", "--max-num-batched-tokens=512", "--block-size=32")
LOADS: Mapping[str, tuple[int, int]] = {"concurrent": (16, 8), "single": (4, 1)}  # prompts, at once
INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
READY_SECONDS = 600.0
ATTEMPTS = 3  # of a measurement in which a server drops a request, as llama.cpp's now and then does
QUANTIZATIONS = ("int8", "int4")

LLAMACPP_SERVER = """
import sys, threading, xllamacpp
model, port, threads = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = model, ["127.0.0.1"], int(port)
params.n_ctx, params.n_parallel = 8192, 8
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(params)
threading.Event().wait()
"""

OPENVINO_RUN = """
import json, sys, time, openvino_genai
model, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prompts = json.load(sys.stdin)
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size, scheduler.max_num_batched_tokens = 1, 512
scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
config = openvino_genai.GenerationConfig()
config.max_new_tokens, config.do_sample, config.ignore_eos, config.apply_chat_template = tokens, False, True, False
def run(prompts):
    began = time.perf_counter()
    pipeline.generate(prompts, config)
    return len(prompts) * tokens / (time.perf_counter() - began)
run(["A first one."])
print(json.dumps({"concurrent": run(prompts[1:]), "single": run(prompts[:1])}))
"""

OWN_RUN = """
import json, sys, time
from poolwright_engine import LLM, SamplingParams
model, threads, tokens, quantization = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
prompts = json.load(sys.stdin)
params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
with LLM(model, cpu_threads=threads, quantization=quantization, dtype="bfloat16", max_num_batched_tokens=512,
         max_num_seqs=16, max_model_len=2048) as llm:
    def run(prompts):
        began = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        return len(prompts) * tokens / (time.perf_counter() - began)
    run(["A first one."])
    print(json.dumps({"concurrent": run(prompts[1:]), "single": run(prompts[:1])}))
"""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_path: str


@dataclass(frozen=True, slots=True)
class Served:
    """What the client measured, by its own words."""

    tokens_per_second: float
    mean_ttft_milliseconds: float
    mean_tpot_milliseconds: float


@dataclass(slots=True)
class Report:
    """`runs`: everything measured. `ratios`: by comparison, one for each pair; above 1 the engine is ahead, except for
    times, which are named so."""

    machine: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def add(self, comparison: str, ratio: float) -> None:
        self.ratios.setdefault(comparison, []).append(ratio)
        print(f"  {comparison}: {ratio:.2f}", flush=True)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        medians = {name: statistics.median(values) for name, values in self.ratios.items()}
        path.write_text(json.dumps({**asdict(self), "medians": medians}, indent=1) + "\n")


def own_server(model: Path, dtype: str, quantization: str, threads: int, port: int) -> Server:
    admin, kv = free_ports(2)
    command = [
        *(sys.executable, "-m", "poolwright_engine", "serve", str(model), "--served-model-name", MODEL),
        *(f"--host={HOST}", f"--port={port}", f"--admin-port={admin}", f"--kv-port={kv}"),
        *(f"--dtype={dtype}", f"--quantization={quantization}", f"--cpu-threads={threads}"),
        *("--kv-cache-mebibytes=2048", *BUDGET),
    ]
    name = f"poolwright {dtype}" + ("" if quantization == "none" else f" {quantization}")
    return Server(name, command, {"OMP_NUM_THREADS": str(threads)}, "/ready")


def vllm_server(model: Path, dtype: str, eager: bool, threads: int, port: int) -> Server:
    command = [
        *(str(python_of("vllm").with_name("vllm")), "serve", str(model), "--served-model-name", MODEL),
        *(f"--host={HOST}", f"--port={port}", f"--dtype={dtype}", *BUDGET, *(["--enforce-eager"] if eager else [])),
    ]
    environment = {
        **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"},
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)},
    }
    return Server(f"vllm {dtype} {'eager' if eager else 'compiled'}", command, environment, "/health")


def llamacpp_server(gguf: Path, threads: int, port: int) -> Server:
    command = [str(python_of("llamacpp")), "-c", LLAMACPP_SERVER, str(gguf), str(port), str(threads)]
    return Server("llama.cpp Q4_1", command, {}, "/health")


@contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[str]:
    with log.open("wb") as output:
        environment = {**os.environ, **server.environment}
        process = subprocess.Popen(
            server.command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://{HOST}:{port}"
            deadline = time.monotonic() + READY_SECONDS
            while not _answers(url + server.ready_path):
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise RuntimeError(f"{server.name} did not become ready:\n{tail}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, load: str, seed: int, tokenizer: Path, folder: Path) -> Served:
    """vLLM's client, in an interpreter of its own."""
    prompts, at_once = LOADS[load]
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [
        *(str(python_of("vllm").with_name("vllm")), "bench", "serve", "--backend=openai", f"--base-url={url}"),
        *(f"--model={MODEL}", f"--tokenizer={tokenizer}", "--dataset-name=random", "--ignore-eos"),
        *(f"--random-input-len={INPUT_TOKENS}", f"--random-output-len={OUTPUT_TOKENS}", f"--seed={seed}"),
        *(f"--num-prompts={prompts}", f"--max-concurrency={at_once}", "--save-result", f"--result-dir={folder}"),
        *("--result-filename=result.json", "--disable-tqdm"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result.is_file():
            raise RuntimeError(f"the client failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found = json.loads(result.read_text())
        if found["completed"] == prompts:
            return Served(found["output_throughput"], found["mean_ttft_ms"], found["mean_tpot_ms"])
        print(f"  {found['completed']} of {prompts} requests were answered: once more", flush=True)
    raise RuntimeError(f"{ATTEMPTS} times, requests were left without an answer")


def serve_and_ask(
    server: Server, port: int, loads: Sequence[str], seed: int, folder: Path, report: Report
) -> dict[str, Served]:
    found = {}
    with running(server, port, folder / "server.log") as url:
        ask(url, "single", 10_000 + seed, smollm2_folder(), folder)  # other prompts than those that are measured
        for load in loads:
            found[load] = served = ask(url, load, seed, smollm2_folder(), folder)
            report.runs.append({"server": server.name, "load": load, "seed": seed, **asdict(served)})
            print(
                f"  {server.name}, {load}: {served.tokens_per_second:.1f} tokens/s, "
                f"TTFT {served.mean_ttft_milliseconds:.0f} ms, TPOT {served.mean_tpot_milliseconds:.1f} ms",
                flush=True,
            )
    return found


def against_vllm(dtype: str, options: argparse.Namespace, folder: Path, report: Report) -> None:
    model, loads = smollm2_folder(), list(LOADS)
    modes = [mode == "eager" for mode in options.vllm_modes]
    for pair in range(options.pairs):
        print(f"vLLM, {dtype}, pair {pair + 1}", flush=True)
        theirs: dict[bool, dict[str, Served]] = {}
        ours: dict[str, Served] = {}
        for is_own in (pair % 2 == 1, pair % 2 == 0):
            for eager in [None] if is_own else modes:
                (port,) = free_ports(1)
                if eager is None:
                    server = own_server(model, dtype, "none", options.threads, port)
                else:
                    server = vllm_server(model, dtype, eager, options.threads, port)
                try:
                    found = serve_and_ask(server, port, loads, pair, folder, report)
                except RuntimeError as error:
                    if eager is not False:
                        raise
                    print(f"  compiled mode left out: {error}", flush=True)  # it needs a compiler
                    continue
                if eager is None:
                    ours = found
                else:
                    theirs[eager] = found
        best = max(theirs, key=lambda mode: theirs[mode]["concurrent"].tokens_per_second)
        modes = [best]
        for load in loads:
            mine, other = ours[load], theirs[best][load]
            report.add(f"vllm {dtype} {load} tokens/s", mine.tokens_per_second / other.tokens_per_second)
            report.add(
                f"vllm {dtype} {load} mean TTFT (time)", mine.mean_ttft_milliseconds / other.mean_ttft_milliseconds
            )
        report.write(options.output)


def against_llamacpp(options: argparse.Namespace, folder: Path, report: Report) -> None:
    gguf = ensure_demo_model()
    for pair in range(options.pairs):
        print(f"llama.cpp, pair {pair + 1}", flush=True)
        names = ["llama.cpp", *QUANTIZATIONS]
        found = {}
        for name in names if pair % 2 else reversed(names):
            (port,) = free_ports(1)
            server = (
                llamacpp_server(gguf, options.threads, port)
                if name == "llama.cpp"
                else own_server(gguf, "bfloat16", name, options.threads, port)
            )
            found[name] = serve_and_ask(server, port, ["single"], pair, folder, report)["single"].tokens_per_second
        for name in QUANTIZATIONS:
            report.add(f"llama.cpp Q4_1 against {name}, single tokens/s", found[name] / found["llama.cpp"])
        report.write(options.output)


def against_openvino(options: argparse.Namespace, report: Report) -> None:
    gguf = ensure_demo_model()
    for pair in range(options.pairs):
        print(f"OpenVINO, pair {pair + 1}", flush=True)
        prompts = [
            f"Chapter {pair}.{number}. " + "The quick brown fox jumps over the lazy dog. " * 10 for number in range(9)
        ]
        given = [str(gguf), str(options.threads), str(OUTPUT_TOKENS)]
        commands = {"openvino": [str(python_of("openvino")), "-c", OPENVINO_RUN, *given]}
        for quantization in QUANTIZATIONS:
            commands[quantization] = [sys.executable, "-c", OWN_RUN, *given, quantization]
        found: dict[str, dict[str, float]] = {}
        for name in commands if pair % 2 else reversed(commands):
            done = subprocess.run(
                commands[name], input=json.dumps(prompts), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
            report.runs.append({"in process": name, "pair": pair, **found[name]})
            print(f"  {name}: " + ", ".join(f"{load} {rate:.1f} tokens/s" for load, rate in found[name].items()))
        for quantization in QUANTIZATIONS:
            for load in LOADS:
                report.add(
                    f"openvino against {quantization}, {load} tokens/s",
                    found[quantization][load] / found["openvino"][load],
                )
        report.write(options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine against others on this CPU.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--against", nargs="+", default=["vllm", "llamacpp", "openvino"])
    parser.add_argument("--vllm-modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=Path("build/bench/engine.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end too
    report = Report({"flags": flags(), "cores": os.cpu_count(), "threads": options.threads, "vllm": VLLM_VERSION})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "vllm" in options.against:
            for dtype in options.dtypes:
                against_vllm(dtype, options, folder, report)
        if "llamacpp" in options.against:
            against_llamacpp(options, folder, report)
        if "openvino" in options.against:
            against_openvino(options, report)
    report.write(options.output)
    print("median of the pairs (lowest to highest)")
    for comparison, values in report.ratios.items():
        print(f"  {comparison:55} {statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()

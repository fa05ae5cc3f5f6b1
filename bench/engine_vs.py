"""The engine against others on this CPU: the same weights, client, threads and budget, in turns, as ratios.

    PYTHONPATH=bench python bench/engine_vs.py [--only "vllm float32" …] [--resume] [--quick] [--page] [--pairs 5]

- floor: what this machine allows (`engine_floor.py`), and so how near each engine comes to it.
- vllm: `vllm bench serve` against both servers, 16 prompts of 128 random tokens with answers of 32, 8 at once, and one
  stream. One server waits while the other is asked; who is asked first alternates. Of vLLM's eager and compiled modes
  the better of the first pair stays.
- llamacpp (Q4_1): the same client, one stream, against weights in 8 and in 4 bits.
- openvino: OpenVINO GenAI has no server, so both in process, one stream and 8 prompts at once.

At most 20 minutes on an idle machine whose environments are made (`environments.py`). Sections are written when they
are done, and after each pair; `--resume` keeps those that are done, `--page` brings `docs/reference/engine-speed.md` up
to date, and `--quick` is one pair of small loads, to a file of its own, never to the docs. Numbers of one run may be
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
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
QUICK_LOADS: Mapping[str, tuple[int, int]] = {"concurrent": (8, 8), "single": (1, 1)}
INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
SECTIONS = ("floor float32", "floor bfloat16", "vllm float32", "vllm bfloat16", "llamacpp", "openvino")
READY_SECONDS = 600.0
ATTEMPTS = 3  # of a measurement in which a server drops a request, as llama.cpp's now and then does
QUANTIZATIONS = ("int8", "int4")

# `vllm bench serve` without the ten seconds that its program takes to begin.
CLIENT = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("done", file=answers, flush=True)
"""

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


class Report:
    """Of each section: everything measured (`runs`), and by comparison one ratio for each pair (`ratios`): above 1 the
    engine is ahead, except for times, which are named so."""

    def __init__(self, path: Path, began: float) -> None:
        self.sections: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
        self._path, self._began, self._name = path, began, ""

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", flush=True)

    def begin(self, name: str, threads: int) -> None:
        machine = {"flags": flags(), "cores": os.cpu_count(), "threads": threads, "vllm": VLLM_VERSION}
        self._name, self.sections[name] = name, {"machine": machine, "runs": [], "ratios": {}}

    def run(self, **measured: Any) -> None:
        self.sections[self._name]["runs"].append(measured)

    def ratio(self, comparison: str, ratio: float) -> None:
        self.sections[self._name]["ratios"].setdefault(comparison, []).append(ratio)
        self.say(f"  {comparison}: {ratio:.2f}")

    def write(self, done_seconds: float | None = None) -> None:
        section = self.sections[self._name]
        section["medians"] = {name: statistics.median(values) for name, values in section["ratios"].items()}
        if done_seconds is not None:
            section["seconds"] = round(done_seconds)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.sections, indent=1) + "\n")

    def floor(self, dtype: str, rows: int) -> float | None:
        """Milliseconds that the products of a step take at least, where they were measured."""
        for found in self.sections.get(f"floor {dtype}", {}).get("runs", []):
            for floor in found["floors"]:
                if floor["rows"] == rows:
                    return float(floor["bound_milliseconds"])
        return None


class Client:
    """vLLM's, in an interpreter of its own."""

    def __init__(self, folder: Path, loads: Mapping[str, tuple[int, int]], report: Report) -> None:
        self._folder, self._loads, self._report = folder, loads, report
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._log = (folder / "client.log").open("wb")
        self._process = subprocess.Popen(
            [str(python_of("vllm")), "-c", CLIENT],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, url: str, load: str, seed: int) -> Served:
        prompts, at_once = self._loads[load]
        result = self._folder / "result.json"
        common = [
            *("--backend=openai", f"--base-url={url}", f"--model={MODEL}", f"--tokenizer={smollm2_folder()}"),
            *("--dataset-name=random", f"--random-input-len={INPUT_TOKENS}", f"--random-output-len={OUTPUT_TOKENS}"),
            *("--ignore-eos", f"--num-prompts={prompts}", f"--max-concurrency={at_once}"),
            *("--save-result", f"--result-dir={self._folder}", "--result-filename=result.json", "--disable-tqdm"),
        ]
        for attempt in range(ATTEMPTS):
            # The client draws the first prompts of one seed alike, whatever their number: loads of one seed would meet
            # each other's in the prefix cache.
            own_seed = (seed * len(self._loads) + list(self._loads).index(load)) * ATTEMPTS + attempt
            arguments = [*common, f"--seed={own_seed}"]
            result.unlink(missing_ok=True)
            if self._process.stdin is None or self._process.stdout is None:
                raise RuntimeError("the client was started without pipes")
            print(json.dumps(arguments), file=self._process.stdin, flush=True)
            if self._process.stdout.readline().strip() != "done" or not result.is_file():
                raise RuntimeError(f"the client failed:\n{(self._folder / 'client.log').read_text()[-3000:]}")
            found = json.loads(result.read_text())
            if found["completed"] == prompts:
                return Served(found["output_throughput"], found["mean_ttft_ms"], found["mean_tpot_ms"])
            self._report.say(f"  {found['completed']} of {prompts} requests were answered: once more")
        raise RuntimeError(f"{ATTEMPTS} times, requests were left without an answer")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """A server that runs, and what its answers are told by."""

    server: Server
    url: str
    dtype: str | None = None  # whose floor it stands on

    def measure(self, client: Client, report: Report, load: str, seed: int) -> Served:
        served = client.ask(self.url, load, seed)
        tpot = served.mean_tpot_milliseconds
        text = (
            f"{served.tokens_per_second:.1f} tokens/s, TTFT {served.mean_ttft_milliseconds:.0f} ms, TPOT {tpot:.1f} ms"
        )
        # The steps of a concurrent load hold chunks too, so only one stream says how near the bound is.
        floor = report.floor(self.dtype, 1) if self.dtype is not None and load == "single" else None
        share = floor / tpot if floor is not None else None
        report.run(server=self.server.name, load=load, seed=seed, share_of_bound=share, **asdict(served))
        report.say(f"  {self.server.name}, {load}: {text}" + (f", {share:.2f} of the bound" if share else ""))
        return served


def own_server(model: Path, dtype: str, quantization: str, threads: int, port: int) -> Server:
    admin, kv = free_ports(2)
    command = [
        *(sys.executable, "-m", "poolwright_engine", "serve", str(model), "--served-model-name", MODEL),
        *(f"--host={HOST}", f"--port={port}", f"--admin-port={admin}", f"--kv-port={kv}"),
        *(f"--dtype={dtype}", f"--quantization={quantization}", f"--cpu-threads={threads}"),
        # After a keep-alive comment, vLLM's client takes the next event for a part of it.
        *("--sse-keep-alive-interval=0", "--kv-cache-mebibytes=2048", *BUDGET),
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


def floor(dtype: str, options: argparse.Namespace, folder: Path, report: Report) -> None:
    path = folder / "floor.json"
    command = [sys.executable, str(Path(__file__).with_name("engine_floor.py")), f"--dtype={dtype}"]
    command += [f"--threads={options.threads}", f"--rounds={1 if options.quick else 3}", f"--json={path}"]
    command += [f"--sample-layers={2 if options.quick else 6}"]
    subprocess.run(command, check=True)
    report.run(**json.loads(path.read_text()))


def against_vllm(dtype: str, options: argparse.Namespace, folder: Path, client: Client, report: Report) -> None:
    model = smollm2_folder()
    with ExitStack() as stack:
        theirs: dict[str, tuple[Asked, ExitStack]] = {}
        for mode in options.vllm_modes:
            (port,) = free_ports(1)
            server = vllm_server(model, dtype, mode == "eager", options.threads, port)
            report.say(f"  starting {server.name}")
            own = stack.enter_context(ExitStack())
            try:
                url = own.enter_context(running(server, port, folder / f"{mode}.log"))
                asked = Asked(server, url, dtype)
                client.ask(url, "single", 10_000)  # other prompts than those that are measured
            except RuntimeError as error:
                if mode != "compiled":
                    raise
                report.say(f"  compiled mode left out: {error}")  # it needs a compiler
                own.close()
                continue
            theirs[mode] = asked, own
        (port,) = free_ports(1)
        server = own_server(model, dtype, "none", options.threads, port)
        report.say(f"  starting {server.name}")
        ours = Asked(server, stack.enter_context(running(server, port, folder / "own.log")), dtype)
        client.ask(ours.url, "single", 10_000)
        for pair in range(options.pairs):
            report.say(f"vLLM, {dtype}, pair {pair + 1} of {options.pairs}")
            found: dict[str, dict[str, Served]] = {}
            line = [("own", ours), *((mode, asked) for mode, (asked, _) in theirs.items())]
            for name, asked in line if pair % 2 else reversed(line):
                found[name] = {load: asked.measure(client, report, load, pair) for load in LOADS}
            best = max(theirs, key=lambda mode: found[mode]["concurrent"].tokens_per_second)
            for mode in set(theirs) - {best}:
                theirs.pop(mode)[1].close()
            for load in LOADS:
                mine, other = found["own"][load], found[best][load]
                report.ratio(f"vllm {dtype} {load} tokens/s", mine.tokens_per_second / other.tokens_per_second)
                ttft = mine.mean_ttft_milliseconds / other.mean_ttft_milliseconds
                report.ratio(f"vllm {dtype} {load} mean TTFT (time)", ttft)
            report.write()


def against_llamacpp(options: argparse.Namespace, folder: Path, client: Client, report: Report) -> None:
    gguf = ensure_demo_model()
    with ExitStack() as stack:
        line: dict[str, Asked] = {}
        for name in ("llama.cpp", *QUANTIZATIONS):
            (port,) = free_ports(1)
            if name == "llama.cpp":
                server = llamacpp_server(gguf, options.threads, port)
            else:
                server = own_server(gguf, "bfloat16", name, options.threads, port)
            report.say(f"  starting {server.name}")
            line[name] = Asked(server, stack.enter_context(running(server, port, folder / f"{name}.log")))
            client.ask(line[name].url, "single", 10_000)
        for pair in range(options.pairs):
            report.say(f"llama.cpp, pair {pair + 1} of {options.pairs}")
            found = {}
            for name in line if pair % 2 else reversed(line):
                found[name] = line[name].measure(client, report, "single", pair).tokens_per_second
            for name in QUANTIZATIONS:
                ratio = found[name] / found["llama.cpp"]
                report.ratio(f"llama.cpp Q4_1 against {name}, single tokens/s", ratio)
            report.write()


def against_openvino(options: argparse.Namespace, report: Report) -> None:
    gguf = ensure_demo_model()
    for pair in range(options.pairs):
        report.say(f"OpenVINO, pair {pair + 1} of {options.pairs}")
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
            report.run(in_process=name, pair=pair, **found[name])
            report.say(f"  {name}: " + ", ".join(f"{load} {rate:.1f} tokens/s" for load, rate in found[name].items()))
        for quantization in QUANTIZATIONS:
            for load in LOADS:
                ratio = found[quantization][load] / found["openvino"][load]
                report.ratio(f"openvino against {quantization}, {load} tokens/s", ratio)
        report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--resume", action="store_true", help="keep sections that the file has")
    parser.add_argument("--quick", action="store_true", help="one pair of small loads: for a look, not for figures")
    parser.add_argument("--page", action="store_true", help="then bring the page of docs/reference up to date")
    parser.add_argument("--pairs", type=int, help="(default: 5)")
    parser.add_argument("--vllm-modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="(default: build/bench/engine.json)")
    options = parser.parse_args()
    options.pairs = options.pairs or (1 if options.quick else 5)
    output = options.output or Path(f"build/bench/engine{'.quick' if options.quick else ''}.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end too
    report = Report(output, time.monotonic())
    wanted = [name for name in options.only if not (options.resume and "seconds" in report.sections.get(name, {}))]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, client = Path(name), None
        for section in wanted:
            began = time.monotonic()
            report.say(section)
            report.begin(section, options.threads)
            kind, _, dtype = section.partition(" ")
            if kind in ("vllm", "llamacpp") and client is None:
                client = Client(folder, QUICK_LOADS if options.quick else LOADS, report)
                stack.callback(client.close)
            if kind == "floor":
                floor(dtype, options, folder, report)
            elif kind == "openvino":
                against_openvino(options, report)
            elif client is not None and kind == "vllm":
                against_vllm(dtype, options, folder, client, report)
            elif client is not None:
                against_llamacpp(options, folder, client, report)
            report.write(time.monotonic() - began)
            report.say(f"{section}: took {report.sections[section]['seconds']} s, written to {output}")
    print("median of the pairs (lowest to highest)")
    for section in options.only:
        for comparison, values in report.sections.get(section, {}).get("ratios", {}).items():
            print(f"  {comparison:55} {statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})")
    if options.page and not options.quick:
        pages = Path(__file__).with_name("engine_pages.py")
        subprocess.run([sys.executable, str(pages), "speed", str(output)], check=True)


if __name__ == "__main__":
    main()

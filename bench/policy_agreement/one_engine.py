"""One real engine on one core, its client on another, beside the simulator with the profile of that very machine."""

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from bench.policy_agreement import comparison, repeats
from bench.policy_agreement.client import Lengths, Load, Wanted, send, send_one_by_one
from bench.policy_agreement.pool import MODEL, engines, on_core, run_engine, url_of
from bench.policy_agreement.replay import EngineOptions, seen, simulated
from bench.policy_agreement.store import Section, Store

from poolwright.local.model import ensure_demo_model
from poolwright.sim.network import Network
from poolwright.sim.profiles import profiled_machine
from poolwright_protocol.kv import KVShape
from poolwright_protocol.roles import Role

NAME = "one engine"
LIMITS = {("ttft", 50): 0.10, ("ttft", 90): 0.10, ("tbt", 50): 0.10, ("tbt", 90): 0.10}
STEP_LIMIT = 0.08
_KV = KVShape(layers=30, kv_heads=3, head_size=64, dtype_bytes=4)  # of SmolLM2-135M in float32
_KV_MEBIBYTES = 512
_LOOKS = 50  # at an idle server, for what a message takes


@dataclass(frozen=True, slots=True)
class Setup:
    load: Load
    options: EngineOptions
    max_model_len: int
    cores: tuple[int, int] | None  # engine's, client's; None: wherever the system puts them

    @property
    def words(self) -> list[str]:
        return [
            "--cpu-threads=1",
            f"--max-num-batched-tokens={self.options.step_tokens}",
            f"--max-num-seqs={self.options.most_streams}",
            f"--max-model-len={self.max_model_len}",
            f"--kv-cache-mebibytes={_KV_MEBIBYTES}",
        ]

    @property
    def own_words(self) -> list[str]:
        return [] if self.cores is None else [f"--core={self.cores[0]}"]


def standard(cores: tuple[int, int] | None) -> Setup:
    """Half of the engine's time is taken, and prompts are computed beside streams."""
    load = Load(36.0, 0.8, Lengths(median=64, spread=0.5, least=24, most=240), Lengths(24, 0.4, 8, 64), seed=11)
    return Setup(load, EngineOptions(step_tokens=128, most_streams=8), max_model_len=384, cores=cores)


async def run(store: Store, setup: Setup, count: int, say: repeats.Say) -> Section:
    section = store.section(NAME, asdict(setup))
    with tempfile.TemporaryDirectory(prefix="agreement-") as name:
        folder = Path(name)
        if "profile" not in section:
            say("measuring the profile of this machine")
            file = folder / "profile.json"
            words = ["profile", str(ensure_demo_model()), *setup.words, f"--output={file}"]
            await run_engine([*setup.own_words, *words], folder / "profile.log")
            section["profile"] = json.loads(file.read_text())
            store.save()
        if len(section["repeats"]) < count:
            await _measure(store, section, setup, count, folder, say)
    _compare(section, setup)
    store.save()
    return section


async def _measure(store: Store, section: Section, setup: Setup, count: int, folder: Path, say: repeats.Say) -> None:
    steps = folder / "steps"
    own = [*setup.own_words, f"--steps={steps}"]
    say("starting the engine")
    async with (
        engines([Role.MIXED], own, setup.words, folder) as (machine,),
        on_core(None if setup.cores is None else setup.cores[1]),
    ):
        url = url_of(machine)
        await send_one_by_one(url, MODEL, [Wanted(0.0, 64, 4)] * 2, 0.1)
        section["message_seconds"] = await _message_seconds(f"{url}/health")

        def of_steps(began: float, ended: float) -> dict[str, Any]:
            rows = [json.loads(line) for line in steps.read_text().splitlines()]
            return {"steps": [row for row in rows if began <= row[0] <= ended]}

        wanted = setup.load.drawn()
        await repeats.fill(section, count, lambda: send(url, MODEL, wanted), store.save, say, of_steps)


async def _message_seconds(url: str) -> float:
    """Half of what a call takes that asks for nothing."""
    took = []
    async with aiohttp.ClientSession() as session:
        for _ in range(_LOOKS):
            began = time.monotonic()
            async with session.get(url) as answer:
                await answer.read()
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.01)
    return statistics.median(took) / 2


def _compare(section: Section, setup: Setup) -> None:
    capacity = (_KV.blocks_in(_KV_MEBIBYTES << 20, 16) - 1) * 16
    model = profiled_machine(section["profile"], "this machine", capacity, _KV.bytes_per_token)
    message = section["message_seconds"]
    network = Network(1e9, message_seconds=message, client_seconds=message)
    runs = [repeats.answers_of(repeat) for repeat in section["repeats"]]
    theirs = [simulated(answers, [Role.MIXED], model, network, setup.options) for answers in runs]
    section["rows"] = [row.as_json() for row in comparison.rows([seen(answers) for answers in runs], theirs, LIMITS)]
    steps = [row for repeat in section["repeats"] for row in repeat["steps"]]
    section["step_limit"] = STEP_LIMIT
    section["step_errors"] = asdict(comparison.step_errors(steps, model.step_time))

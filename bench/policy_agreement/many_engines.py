"""A pool of real processes whose devices are paced by a table, beside the simulator with the same table.

Router, HTTP, scheduler, loop, hand-off and detokenizer are what users run; the model is not computed, so that a pool of
large GPUs fits on two cores.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.policy_agreement import comparison, repeats
from bench.policy_agreement.client import Answer, Lengths, Load, send, send_one_by_one
from bench.policy_agreement.measured_network import Ways, lone_requests, ways
from bench.policy_agreement.paced_runner import KV_SHAPE
from bench.policy_agreement.pool import MODEL, engines, router
from bench.policy_agreement.replay import EngineOptions, seen, simulated
from bench.policy_agreement.slowed import SlowedStepTime
from bench.policy_agreement.store import Section, Store

from poolwright.core.machine import Machine
from poolwright.core.router_note import RouterNote
from poolwright.sim import profiles
from poolwright.sim.policy import Slo
from poolwright.sim.step_fit import prices
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role

NAME = "many engines"
LIMITS = {
    ("ttft", 50): 0.05,
    ("ttft", 90): 0.05,
    ("ttft", 99): 0.10,
    ("tbt", 50): 0.05,
    ("tbt", 90): 0.05,
    ("tbt", 99): 0.10,
}
_KV_TOKENS = 65_536
_PAUSE_SECONDS = 0.02
LEAST_GAPS = 5000


@dataclass(frozen=True, slots=True)
class Setup:
    """`machine`: a name of `poolwright.sim.profiles`. `slo`: the pool's, as routers are told it beside what work costs.
    `slowed`: steps take so many times what the table says. `lone_prompts`: two lengths for the idle pool, a step
    each. `least_gaps`: of a repeat, for the percentiles that are compared."""

    roles: tuple[Role, ...]
    machine: str
    load: Load
    options: EngineOptions
    slo: Slo
    lone_prompts: tuple[int, int]
    lone_rounds: int
    slowed: float = 1.0
    max_model_len: int = 4096
    least_gaps: int = 0

    def model(self) -> MachineModel:
        """The table's steps, with the KV that these engines hold and hand over."""
        table = profiles.machine(self.machine)
        return table._replace(
            step_time=SlowedStepTime(table.step_time, self.slowed),
            kv_capacity_tokens=_KV_TOKENS,
            kv_bytes_per_token=KV_SHAPE.bytes_per_token,
        )

    def note(self) -> RouterNote:
        """What a controller would write on each machine."""
        model, options = self.model(), self.options
        lines = prices(model, step_tokens=options.step_tokens, most_streams=options.most_streams)
        profile = MachineProfile(
            lines.profile.decode,
            lines.profile.mixed,
            max_tokens_per_step=lines.step_tokens,
            max_sequences=lines.most_streams,
            tile_tokens=lines.tile_tokens,
            kv_capacity_tokens=lines.kv_capacity_tokens,
            kv_bytes_per_token=lines.kv_bytes_per_token,
        )
        return RouterNote(profile, self.slo.ttft_seconds, self.slo.tbt_seconds, float(self.slo.tbt_percentile))


def standard() -> Setup:
    """Steps take 55 to 220 ms, twice what the table says: engines have cores of their own where such machines stand,
    and here six share what there is. No percentile that is compared lies where two kinds of gaps meet: there, one step
    more with a prompt in it would make half of the value."""
    load = Load(44.0, 2.5, Lengths(median=400, spread=0.6, least=64, most=2000), Lengths(60, 0.5, 8, 160), seed=7)
    roles = (Role.PROMPT, Role.PROMPT, Role.TOKEN, Role.TOKEN, Role.TOKEN, Role.MIXED)
    slo = Slo(ttft_seconds=2.0, tbt_seconds=0.4)
    options = EngineOptions(512, 64)
    return Setup(roles, "a100-llama-70b-tp4", load, options, slo, (128, 512), 10, slowed=2.0, least_gaps=LEAST_GAPS)


def short() -> Setup:
    """Two machines and seconds, for tests, with steps of 110 to 440 ms: a host that others use is late by tens."""
    load = Load(8.0, 1.2, Lengths(median=300, spread=0.5, least=64, most=900), Lengths(12, 0.4, 6, 24), seed=3)
    slo = Slo(ttft_seconds=4.0, tbt_seconds=0.8)
    roles = (Role.PROMPT, Role.TOKEN)
    return Setup(roles, "a100-llama-70b-tp4", load, EngineOptions(512, 64), slo, (128, 512), 2, slowed=4.0)


async def run(store: Store, setup: Setup, count: int, say: repeats.Say) -> Section:
    section = store.section(NAME, asdict(setup))
    if "ways" not in section or len(section["repeats"]) < count:
        with tempfile.TemporaryDirectory(prefix="agreement-") as name:
            await _measure(store, section, setup, count, Path(name), say)
    _compare(section, setup)
    store.save()
    return section


async def _measure(store: Store, section: Section, setup: Setup, count: int, folder: Path, say: repeats.Say) -> None:
    own = [f"--paced={setup.machine}", f"--slowed={setup.slowed}", f"--kv-tokens={_KV_TOKENS}"]
    words = [
        "--device=cpu",
        f"--max-num-batched-tokens={setup.options.step_tokens}",
        f"--max-num-seqs={setup.options.most_streams}",
        f"--max-model-len={setup.max_model_len}",
    ]
    say(f"starting {len(setup.roles)} engines")
    async with engines(setup.roles, own, words, folder, setup.note()) as machines:
        if "ways" not in section:
            say("measuring the ways of an idle pool")
            section["ways"] = asdict(await _ways(machines, setup, folder))
            store.save()
        wanted = setup.load.drawn()

        async def measure() -> list[Answer]:
            # A new router each time: what one knows of machines' speeds is a part of what it does.
            async with router(machines, folder) as url:
                return await send(url, MODEL, wanted)

        await repeats.fill(section, count, measure, store.save, say)


async def _ways(machines: Sequence[Machine], setup: Setup, folder: Path) -> Ways:
    prompt = next(machine for machine in machines if machine.role is Role.PROMPT)
    token = next(machine for machine in machines if machine.role is Role.TOKEN)
    found = []
    for some in ([token], [prompt, token]):
        async with router(some, folder) as url:
            await send_one_by_one(url, MODEL, lone_requests(setup.lone_prompts, 1), _PAUSE_SECONDS)  # connections
            wanted = lone_requests(setup.lone_prompts, setup.lone_rounds)
            found.append(await send_one_by_one(url, MODEL, wanted, _PAUSE_SECONDS))
    whole, split = found
    model = setup.model()
    return ways(whole, split, model.step_time, model.kv_bytes_per_token)


def _compare(section: Section, setup: Setup) -> None:
    model, network = setup.model(), Ways(**section["ways"]).network()
    runs = [repeats.answers_of(repeat) for repeat in section["repeats"]]
    section["least_gaps"] = setup.least_gaps
    theirs = [simulated(answers, setup.roles, model, network, setup.options, setup.slo) for answers in runs]
    section["rows"] = [row.as_json() for row in comparison.rows([seen(answers) for answers in runs], theirs, LIMITS)]

"""The cells of the comparison: what `cells.yaml` says, and the trace, setting and conditions that it makes of a draw.

Knows no policy. The rate of a cell is a share of what the fluid bound allows, which is asked once and handed in.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from poolwright.sim import bounds, profiles, traces
from poolwright.sim.clairvoyant import knowing
from poolwright.sim.measures import alone_seconds
from poolwright.sim.network import Network
from poolwright.sim.policy import Setting, Slo
from poolwright.sim.profiles import TableStepTime
from poolwright.sim.request import Trace
from poolwright.sim.simulation import Conditions, Loss
from poolwright.sim.step_time import Chunk, MachineModel, StepTime
from poolwright.sim.traces import Copies

FILE = Path(__file__).with_name("cells.yaml")
SLICE_SECONDS = traces.SLICE_SECONDS
DRAIN_SECONDS = 120.0  # after the last arrival; what has not ended by then is lost
ALONE_CONTEXT_TOKENS = 1000
TTFT_PROMPT_TOKENS, TTFT_LONG_TOKENS = 2048, 16384
# Splitwise (ISCA 2024, table VI) at the 90th percentile: what policies steer by in a cell of its nine percentiles.
NINE_TTFT, NINE_TBT = 3.0, 1.5
# Of a machine's network. Splitwise (ISCA 2024, section 5): 200 Gbps of an A100's machine, 400 of an H100's.
GBPS = {"a100": 200.0, "h100": 400.0, "h200": 400.0}
LAYERS = {"70b": 80, "8b": 32}


@dataclass(frozen=True, slots=True)
class Burst:
    at_seconds: float
    factor: float
    rise_seconds: float
    hold_seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The machine at that place of the setting."""

    machine: int
    at_seconds: float
    back_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Flood:
    """`share`: what comes on top, of what the machines can do."""

    at_seconds: float
    hold_seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    trace: str
    slice: int
    machine: str
    machines: int
    share: float
    seconds: float
    ttft: float
    cap: float | None = None
    nine: bool = False
    reference: str | None = None
    ttft_per_token: float = 0.0
    other: str | None = None
    every_seconds: float = SLICE_SECONDS
    start: int | None = None
    burst: Burst | None = None
    lost: Lost | None = None
    flood: Flood | None = None
    block_tokens: int = 16
    admission: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        if (self.cap is None) is not self.nine or self.nine is (self.reference is None):
            raise ValueError(f"cell {self.name}: give cap, or nine and reference")
        for name in (self.trace, self.other):
            if name is not None and name not in traces.RECORDED:
                raise ValueError(f"cell {self.name}: there is no trace {name!r} among {', '.join(traces.RECORDED)}")
        if not re.fullmatch(r"(a|h)[12]00-llama-(70b-tp[48]|8b-tp1)", self.machine):
            raise ValueError(f"cell {self.name}: {self.machine!r} is none of the machines with a known network")
        if self.block_tokens < 1:
            raise ValueError(f"cell {self.name}: block_tokens is at least 1")
        if self.machines < 2 or not (self.share > 0 and self.seconds > 0 and self.ttft > 0):
            raise ValueError(f"cell {self.name}: needs two machines, and share, seconds and ttft above 0")
        if self.start is not None and not 0 < self.start < self.machines:
            raise ValueError(f"cell {self.name}: a first split leaves a machine for each phase")
        if self.lost is not None and not 0 <= self.lost.machine < self.machines:
            raise ValueError(f"cell {self.name}: there is no machine {self.lost.machine} to lose")

    @property
    def changes(self) -> bool:
        """Whether the best split may be another one at another time."""
        return any(part is not None for part in (self.other, self.start, self.burst, self.lost, self.flood))

    def document(self) -> dict[str, Any]:
        """All that a run depends on."""
        left_out = ("name", "quick", "admission")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}


@dataclass(frozen=True, slots=True)
class Twist:
    """What is believed of a world beside what is: `profile`, `bandwidth` and `forecast` multiply step times, the rate
    of the network and the mean output. `knows`: every output is known, and moves cost nothing."""

    scrape_delay_seconds: float = 0.0
    profile: float = 1.0
    bandwidth: float = 1.0
    forecast: float = 1.0
    knows: bool = False


AS_IT_IS = Twist()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the fluid bound says of the cell's machines together: requests a second of each of its traces, and the
    share of the time that prompts take."""

    requests_per_second: tuple[float, ...]
    prompt_share: float


@dataclass(frozen=True, slots=True)
class World:
    cell: Cell
    trace: Trace
    setting: Setting
    conditions: Conditions
    prompt: int  # machines of the prompt pool that the mean load suggests, or that the cell starts with

    @property
    def told(self) -> Setting:
        """For policies that have one TTFT target for all requests: that of the mean prompt."""
        slo = self.setting.slo
        ttft = slo.ttft_seconds + slo.ttft_seconds_per_token * self.setting.expected_prompt_tokens
        return replace(self.setting, slo=replace(slo, ttft_seconds=ttft, ttft_seconds_per_token=0.0))


# The file.


def cells(at: Path = FILE) -> dict[str, Cell]:
    """By name. Raises ValueError."""
    document = yaml.safe_load(at.read_text(encoding="utf-8"))
    defaults = document["defaults"]
    return {name: _cell(name, {**defaults, **given}) for name, given in document["cells"].items()}


def tuning(at: Path = FILE) -> tuple[int, Mapping[str, Mapping[str, list[float]]]]:
    """The held-out slice, and for each policy the values to try."""
    document = dict(yaml.safe_load(at.read_text(encoding="utf-8"))["tuning"])
    return int(document.pop("held_out_slice")), document


def _cell(name: str, given: Mapping[str, Any]) -> Cell:
    parts: Mapping[str, type[Any]] = {"burst": Burst, "lost": Lost, "flood": Flood}
    try:
        made = {key: parts[key](**value) if key in parts else value for key, value in given.items()}
        return Cell(name=name, **made)
    except TypeError as error:
        raise ValueError(f"cell {name}: {error}") from None


# What a cell makes.


@cache
def model_of(name: str) -> MachineModel:
    return profiles.machine(name)


def slo(cell: Cell) -> Slo:
    model = model_of(cell.reference or cell.machine)
    step = model.step_time.seconds((), 1, ALONE_CONTEXT_TOKENS)
    prompt = model.step_time.seconds((Chunk(0, TTFT_PROMPT_TOKENS),), 0, 0.0)
    if cell.nine:
        return Slo(NINE_TTFT * prompt, NINE_TBT * step)
    assert cell.cap is not None
    token = alone_seconds(TTFT_LONG_TOKENS, 1, model)[0] / TTFT_LONG_TOKENS
    return Slo(cell.ttft * prompt, cell.cap * step, cell.ttft_per_token * token)


@cache
def _recorded(name: str) -> Trace:
    return traces.recorded(name)


@cache
def _slice(name: str, number: int, seconds: float) -> Trace:
    start = number * SLICE_SECONDS
    hour = _recorded(name)
    if start + seconds > hour.horizon_seconds:
        raise ValueError(f"{name} ends before second {start + seconds:g}")
    return traces.between(hour, start, start + seconds)


def _names(cell: Cell) -> list[str]:
    return [cell.trace] if cell.other is None else [cell.trace, cell.other]


def capacity(cell: Cell) -> Capacity:
    model, target = model_of(cell.machine), slo(cell)
    time = model.step_time
    assert isinstance(time, TableStepTime)
    rates, prompts = [], []
    for name in _names(cell):
        trace = _slice(name, cell.slice, cell.seconds)
        kinds = bounds.steps(time, model.kv_capacity_tokens, target.tbt_seconds, bounds.context_range(trace))
        work = bounds.mean(bounds.works(time, trace))
        found = bounds.fluid(kinds, work)
        rates.append(found.requests_per_second * cell.machines)
        prompts.append(found.prices.prompt(work) / found.prices.seconds(work))
    return Capacity(tuple(rates), sum(prompts) / len(prompts))


@lru_cache(8)
def _calm(cell: Cell, able: Capacity, seed: int, copies: Copies) -> Trace:
    """Before anything happens to it."""
    made = []
    for name, rate in zip(_names(cell), able.requests_per_second, strict=True):
        part = _slice(name, cell.slice, cell.seconds)
        factor = cell.share * rate * part.horizon_seconds / len(part)
        made.append(traces.scaled(part, factor, seed, copies=copies))
    return made[0] if len(made) == 1 else traces.alternated(made[0], made[1], cell.every_seconds)


@lru_cache(8)
def _trace(cell: Cell, able: Capacity, seed: int, copies: Copies) -> Trace:
    trace = _calm(cell, able, seed, copies)
    if cell.burst is not None:
        at, burst = cell.burst.at_seconds, cell.burst
        rest = {"factor": burst.factor, "rise_seconds": burst.rise_seconds, "hold_seconds": burst.hold_seconds}
        trace = traces.with_burst(trace, at, seed, **rest)
    if cell.flood is not None:
        rate = cell.flood.share * able.requests_per_second[0]
        trace = traces.with_flood(trace, cell.flood.at_seconds, cell.flood.hold_seconds, rate, seed)
    return trace


def world(cell: Cell, able: Capacity, seed: int, copies: Copies = Copies.JITTERED, twist: Twist = AS_IT_IS) -> World:
    """`seed`: the draw of copies, burst and flood."""
    model = model_of(cell.machine)
    gpu, _, size, _ = cell.machine.split("-")
    bytes_per_second = GBPS[gpu] * 1e9 / 8
    mean = traces.means(_calm(cell, able, seed, copies))
    believed = model if twist.profile == 1.0 else model._replace(step_time=ScaledTime(model.step_time, twist.profile))
    setting = Setting(
        slo(cell),
        [believed] * cell.machines,
        bytes_per_second * twist.bandwidth,
        mean.prompt_tokens,
        mean.output_tokens * twist.forecast,
        mean.requests_per_second,
    )
    lost = cell.lost
    conditions = Conditions(
        network=Network(bytes_per_second, layers=LAYERS[size]),
        scrape_delay_seconds=twist.scrape_delay_seconds,
        losses=[] if lost is None else [Loss(lost.machine, lost.at_seconds, lost.back_after_seconds)],
        drain_seconds=DRAIN_SECONDS,
        models=[model] * cell.machines,
    )
    wanted = round(cell.machines * able.prompt_share)
    return World(
        cell,
        _trace(cell, able, seed, copies),
        setting,
        knowing(conditions) if twist.knows else conditions,
        cell.start or max(1, min(cell.machines - 1, wanted)),
    )


class ScaledTime:
    """What somebody believes of a machine whose steps take another time."""

    def __init__(self, real: StepTime, factor: float) -> None:
        self._real = real
        self._factor = factor

    @property
    def name(self) -> str:
        return self._real.name

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        return self._factor * self._real.seconds(chunks, decodes, context_tokens)

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        steps, spent = self._real.decode_run(decodes, context_tokens, seconds / self._factor, most_steps)
        return steps, self._factor * spent

"""Kinds of machines: step times read from tables, memory for KV, and what they cost. Knows no requests.

A chunk after `start` tokens costs cumulative(start + tokens) - cumulative(start) of attention, so that it pays for
reading what was computed before it, and the chunks of a prompt pay together what the prompt costs at once. More prompt
tokens, and more context, never take less. More decodes may, where their contexts are shorter: kernels were measured so.
Bounds read a second table that is nowhere above the first and never falls.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poolwright.sim import data_files
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_protocol.kv import KVShape
from poolwright_protocol.least_squares import cost_weights
from poolwright_protocol.step_time import StepProfile, profile_from_document

Array = NDArray[np.float64]

_MOST_LISTED_TOKENS = 1 << 17
_MOST_DECODES = 1024  # of a table made from lines
_TABLED_CONTEXTS = (0.0, 2.5e4, 5e4, 1e5, 2e5, 4e5, 1e6)

LLAMA_70B = KVShape(layers=80, kv_heads=8, head_size=128, dtype_bytes=2)
LLAMA_8B = KVShape(layers=32, kv_heads=8, head_size=128, dtype_bytes=2)
BLOOM_176B = KVShape(layers=70, kv_heads=112, head_size=128, dtype_bytes=2)
OPT_13B = KVShape(layers=40, kv_heads=40, head_size=128, dtype_bytes=2)
OPT_66B = KVShape(layers=64, kv_heads=72, head_size=128, dtype_bytes=2)


class Curve:
    """Piecewise linear from 0, never falling. Beyond the last knot, `power` 1 continues the last piece, and 2 grows
    with the square. Values at whole numbers are listed up to the largest one asked for."""

    def __init__(self, knots: Mapping[float, float], power: int = 1) -> None:
        if not knots or min(knots) < 0 or not all(math.isfinite(y) for y in knots.values()):
            raise ValueError("a curve needs finite knots, none below 0")
        points = sorted(knots.items())
        self.x: Array = np.array([x for x, _ in points], float)
        self.y: Array = _monotone(np.array([y for _, y in points], float))
        self._power = power
        self._slope = float((self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2])) if len(points) > 1 else 0.0
        self._listed: list[float] = []

    def __call__(self, tokens: int) -> float:
        if tokens < len(self._listed):
            return self._listed[tokens]
        if tokens >= _MOST_LISTED_TOKENS:
            return float(self.at(np.array([tokens], float))[0])
        self._listed = self.at(np.arange(1 << max(10, tokens.bit_length()), dtype=float)).tolist()
        return self._listed[tokens]

    def at(self, x: Array) -> Array:
        last_x, last_y = float(self.x[-1]), float(self.y[-1])
        beyond = last_y * (x / last_x) ** 2 if self._power == 2 else last_y + (x - last_x) * self._slope
        inside: Array = np.interp(x, self.x, self.y)
        return np.where(x > last_x, beyond, inside)


def _monotone(values: Array, axis: int = 0) -> Array:
    """The largest that never falls along `axis` and is nowhere above `values`."""
    flipped: Array = np.minimum.accumulate(np.flip(values, axis), axis)
    return np.flip(flipped, axis)


class DecodeTable:
    """Seconds by decodes B and their tokens of KV, C: linear in C between knots that all B share, and linear in B.

    At equal C and not at equal contexts, for reading KV costs by its size."""

    def __init__(self, measured: Mapping[tuple[int, float], float]) -> None:
        """By (decodes, KV tokens of them all), at least two of these for each number of decodes."""
        self.batches: Array = np.array(sorted({float(b) for b, _ in measured}))
        self.knots: Array = np.array(sorted({0.0} | {context for _, context in measured}))
        table = np.array([self._row(measured, int(b)) for b in self.batches])
        self._table: Array = _monotone(np.maximum(table, 0.0), 1)
        self._least: Array = _monotone(self._table, 0)

    def _row(self, measured: Mapping[tuple[int, float], float], decodes: int) -> Array:
        """Outside of what was measured, the nearest piece goes on."""
        points = sorted((context, value) for (b, context), value in measured.items() if b == decodes)
        x, y = (np.array(column) for column in zip(*points, strict=True))
        below, above = ((y[j] - y[i]) / (x[j] - x[i]) for i, j in ((0, 1), (-2, -1)))
        row: Array = np.interp(self.knots, x, y)
        row += np.minimum(self.knots - x[0], 0.0) * below + np.maximum(self.knots - x[-1], 0.0) * above
        return row

    def row(self, decodes: int, *, least: bool = False) -> Array:
        """Values at the knots; `least`: no more than any of as many decodes or more."""
        table = self._least if least else self._table
        i = int(np.clip(np.searchsorted(self.batches, decodes) - 1, 0, len(self.batches) - 2))
        low, high = float(self.batches[i]), float(self.batches[i + 1])
        share = max(0.0, (decodes - low) / (high - low))
        more = table[i + 1] - table[i]
        # Beyond what was measured, where the last kernels did more decodes in less time, no more of that is promised.
        result: Array = table[i] + min(share, 1.0) * more + max(share - 1.0, 0.0) * np.maximum(more, 0.0)
        return result


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step of p prompt tokens, and B decodes over C tokens of KV:

    p = 0: decodes(B, C), and where `ride` also tokens(B) + logits(B);
    p > 0: tokens(p) + decodes(B, C) - shared, or where `ride` tokens(p + B) + logits(B + 1) + decodes(B, C);
           and of its chunks, chunk_fixed once and what they add to `chunk_attention`, cumulative over a prompt.

    `ride`: tokens of prompts and of decodes pass the same matrices together, and `decodes` is their attention alone.
    Else both were measured apart, and `shared` is what a step pays once.
    """

    tokens: Curve
    decodes: DecodeTable
    ride: bool = True
    logits: Curve | None = None
    chunk_fixed: float = 0.0
    chunk_attention: Curve | None = None
    shared: float = 0.0


class _Row:
    """For one number of decodes: seconds of their table by KV tokens, plain floats to be quick, and what a step has
    besides, with prompt tokens and without."""

    __slots__ = ("alone", "beside", "knots", "slopes", "values")

    def __init__(self, knots: list[float], values: Array, alone: float, beside: float) -> None:
        self.knots = knots
        slopes = np.diff(values) / np.diff(knots)
        self.values: list[float] = values.tolist()
        self.slopes: list[float] = [*slopes.tolist(), float(slopes[-1])]
        self.alone = alone
        self.beside = beside

    def __call__(self, context_tokens: float) -> float:
        i = bisect_right(self.knots, context_tokens) - 1
        return self.values[i] + (context_tokens - self.knots[i]) * self.slopes[i]


class TableStepTime:
    """A `StepTime` of parts. Rows are kept once made: there are few numbers of decodes."""

    def __init__(self, name: str, parts: Parts) -> None:
        self._name = name
        self.parts = parts
        self._knots: list[float] = parts.decodes.knots.tolist()
        self._rows: dict[int, _Row] = {}
        self._tokens = parts.tokens
        self._chunks = parts.chunk_attention

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"TableStepTime({self._name!r})"

    def _row(self, decodes: int) -> _Row:
        row = self._rows.get(decodes)
        if row is None:
            parts = self.parts
            logits = parts.logits or (lambda _: 0.0)
            values = parts.decodes.row(decodes) if decodes else np.zeros(len(self._knots))
            if parts.ride:
                alone, beside = (parts.tokens(decodes) + logits(decodes)) if decodes else 0.0, logits(decodes + 1)
            else:
                alone, beside = 0.0, -parts.shared if decodes else 0.0
            row = self._rows[decodes] = _Row(self._knots, values, alone, beside + parts.chunk_fixed)
        return row

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        row = self._rows.get(decodes) or self._row(decodes)
        if not chunks:
            return row.alone + row(context_tokens) if decodes else 0.0
        tokens = 0
        result = row.beside
        attention = self._chunks
        for start, length in chunks:
            tokens += length
            if attention is not None:
                result += attention(start + length) - attention(start)
        result += self._tokens(tokens + decodes if self.parts.ride else tokens)
        return result + row(context_tokens) if decodes else result

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        """Between knots of the context, step times are an arithmetic series."""
        row = self._row(decodes)
        knots = row.knots
        steps, spent = 0, 0.0
        while True:
            i = bisect_right(knots, context_tokens) - 1
            first = row.alone + row.values[i] + (context_tokens - knots[i]) * row.slopes[i]
            growth = row.slopes[i] * decodes
            within = most_steps - steps
            if i + 1 < len(knots):
                within = min(within, math.ceil((knots[i + 1] - context_tokens) / decodes))
            fit = _steps_begun(first, growth, seconds - spent, within)
            if steps == 0:
                fit = max(1, fit)
            steps += fit
            spent += fit * first + fit * (fit - 1) / 2 * growth
            if fit < within or steps >= most_steps or spent >= seconds:
                return steps, spent
            context_tokens += fit * decodes

    # What bounds need: the least a step can take, whoever's the prompt tokens are, and what each prompt adds.

    @property
    def prompt_knots(self) -> Array:
        return self._tokens.x

    @property
    def context_knots(self) -> Array:
        return self.parts.decodes.knots

    def least_seconds(self, prompt_tokens: Array, decodes: int, context_tokens: Array) -> Array:
        """Without the attention of chunks, which `prompt_seconds` has in whole."""
        row, has_prompt = self._row(decodes), prompt_tokens > 0
        beside = row.beside + self._tokens.at(prompt_tokens + (decodes if self.parts.ride else 0))
        result = np.where(has_prompt, beside, row.alone)
        if decodes:
            knots, values = self.parts.decodes.knots, self.parts.decodes.row(decodes, least=True)
            beyond = np.maximum(context_tokens - knots[-1], 0.0) * (values[-1] - values[-2]) / (knots[-1] - knots[-2])
            result = result + np.interp(context_tokens, knots, values) + beyond
        return result

    def prompt_seconds(self, prompt_tokens: int) -> float:
        return self._chunks(prompt_tokens) - self._chunks(0) if self._chunks is not None else 0.0


def _steps_begun(first: float, growth: float, seconds: float, most: int) -> int:
    """How many of `most` steps of first, first + growth, … begin before `seconds` have passed."""
    if seconds <= 0.0:
        return 0
    if (most - 1) * first + (most - 1) * (most - 2) / 2 * growth < seconds:
        return most
    # The n-th begins at (n - 1) · first + (n - 1)(n - 2)/2 · growth; solved for the last one before `seconds`.
    half = first - growth / 2
    root = seconds / first if growth == 0.0 else (math.sqrt(half * half + 2 * growth * seconds) - half) / growth
    begun = max(1, min(most, math.ceil(root)))
    while begun > 1 and (begun - 1) * first + (begun - 1) * (begun - 2) / 2 * growth >= seconds:
        begun -= 1
    while begun < most and begun * first + begun * (begun - 1) / 2 * growth < seconds:
        begun += 1
    return begun


class ProfileStepTime:
    """A `StepTime` of the lines that `poolwright-engine profile` fits. A step with prompts is never quicker than its
    decodes are alone, whatever the fit of the one says beside that of the other."""

    def __init__(self, name: str, profile: StepProfile) -> None:
        self._name = name
        self.profile = profile

    @property
    def name(self) -> str:
        return self._name

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        alone = self.profile.decode.seconds(decodes, context_tokens) if decodes else 0.0
        if not chunks:
            return alone
        tokens = decodes + sum(chunk.tokens for chunk in chunks)
        kv_tokens = context_tokens + sum(chunk.start + chunk.tokens for chunk in chunks)
        return max(alone, self.profile.mixed.seconds(tokens, kv_tokens))

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        first = self.profile.decode.seconds(decodes, context_tokens)
        growth = self.profile.decode.kv_token_seconds * decodes
        steps = max(1, _steps_begun(first, growth, seconds, most_steps))
        return steps, steps * first + steps * (steps - 1) / 2 * growth

    @property
    def prompt_knots(self) -> Array:
        return np.array([0.0])

    @property
    def context_knots(self) -> Array:
        return np.array([0.0])

    def least_seconds(self, prompt_tokens: Array, decodes: int, context_tokens: Array) -> Array:
        """A chunk attends at least to itself."""
        decode, mixed = self.profile.decode, self.profile.mixed
        alone = decode.seconds(decodes, 0.0) + decode.kv_token_seconds * context_tokens if decodes else 0.0
        beside = mixed.fixed_seconds + mixed.token_seconds * (prompt_tokens + decodes)
        beside = beside + mixed.kv_token_seconds * (context_tokens + prompt_tokens)
        return np.where(prompt_tokens > 0, np.maximum(alone, beside), alone)

    def prompt_seconds(self, prompt_tokens: int) -> float:
        return 0.0


class Mixed(StrEnum):
    """What a table whose prompts and decodes were measured apart says of a step with both: SHARED, that decodes pay
    only what they add to a step of decodes (the optimist's); APART, that it takes as long as the two steps."""

    SHARED = "shared"
    APART = "apart"


@dataclass(frozen=True, slots=True)
class _Price:
    """Of one GPU. Splitwise (ISCA 2024), table I: $17.6 and $38 an hour for machines of eight; power of the GPUs alone.
    An H200's price is not in it; its power and memory are its data sheet's."""

    dollars_per_hour: float | None
    watts: float
    memory_bytes: int


_PRICES = {
    "a100": _Price(17.6 / 8, 400.0, 80 << 30),
    "h100": _Price(38.0 / 8, 700.0, 80 << 30),
    "h200": _Price(None, 700.0, 141 * 10**9),
}


def _machine(
    name: str, hardware: str, step_time: TableStepTime, gpus: int, kv_capacity_tokens: int, shape: KVShape
) -> MachineModel:
    price = _PRICES[hardware]
    dollars = None if price.dollars_per_hour is None else price.dollars_per_hour * gpus
    return MachineModel(name, step_time, kv_capacity_tokens, shape.bytes_per_token, gpus, dollars, price.watts * gpus)


@cache
def kernel_machines(at: Path | None = None) -> Mapping[str, MachineModel]:
    """`{a100,h100,h200}-llama-{70b-tp8,70b-tp4,8b-tp1}`: Llama on vLLM's kernels as aiconfigurator measured them (GEMM,
    attention and all-reduce tables; Apache-2.0), composed to steps. Time of the CPU between kernels is not in them."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in data_files.rows("iteration_times_ms.csv", at):
        groups.setdefault((row["hw"], row["model"], row["tp"]), []).append(row)
    machines = {}
    for (hardware, model, degree), rows in groups.items():
        gpu = hardware.removesuffix("_sxm")
        name = f"{gpu}-{model}-tp{degree}"
        shape = LLAMA_70B if model == "llama-70b" else LLAMA_8B
        step_time = TableStepTime(name, _kernel_parts(rows))
        machines[name] = _machine(name, gpu, step_time, int(degree), int(rows[0]["kv_tokens_capacity"]), shape)
    return machines


def _kernel_parts(rows: Sequence[Mapping[str, str]]) -> Parts:
    """Each column of the table depends on less than the whole step: found again here, so that any step can be had."""
    linear: dict[float, float] = {}
    chunks: dict[float, float] = {}
    decodes: dict[tuple[int, float], float] = {}
    logits: dict[float, list[float]] = {}
    for row in rows:
        prompt, batch, context = int(row["prefill_tokens"]), int(row["decode_batch"]), int(row["decode_ctx"])
        parts = [float(row[f"{part}_ms"]) * 1e-3 for part in ("linear", "ctx_attn", "gen_attn")]
        linear[prompt + batch] = parts[0]
        if prompt:
            chunks[prompt] = parts[1]
        if batch:
            decodes[batch, batch * context] = parts[2]
        # What is left grows with the rows whose logits are computed.
        logits.setdefault(batch + bool(prompt), []).append(float(row["iter_ms"]) * 1e-3 - sum(parts))
    # The least prompt is so short that its attention is the launches of the kernels, which a step pays once.
    launches = min(chunks.values())
    return Parts(
        tokens=Curve(linear),
        decodes=DecodeTable(decodes),
        logits=Curve({count: median(values) for count, values in logits.items()}),
        chunk_fixed=launches,
        chunk_attention=Curve({0: 0.0} | {n: max(0.0, seconds - launches) for n, seconds in chunks.items()}, power=2),
    )


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Seconds of a step of B decodes over C tokens of KV: fixed + decode · B + kv · C."""

    fixed: float
    decode: float
    kv: float

    def seconds(self, decodes: float, context_tokens: float) -> float:
        return self.fixed + self.decode * decodes + self.kv * context_tokens


def _tabled(lines: Callable[[int], DecodeLine], batches: Sequence[int]) -> DecodeTable:
    return DecodeTable({(b, c): lines(b).seconds(b, c) for b in batches for c in _TABLED_CONTEXTS})


@cache
def splitwise_machines(at: Path | None = None, mixed: Mixed = Mixed.SHARED) -> Mapping[str, MachineModel]:
    """`splitwise-{a100,h100,h100-pcap}-{llama2-70b-tp8,…,bloom-176b-tp8}`: the measurements of splitwise-sim (MIT),
    read otherwise than its own performance model does:

    - decodes by their number and their context, where it looks up prompt size × batch size and so finds 64 decodes
      hardly slower than one (30.7 for 50.2 ms on an H100);
    - KV of grouped-query attention by its KV heads, where it counts all heads, eight times too much for Llama-2 70B;
    - 64 decodes at TP2, which were measured at far less than 32 (the runs did not do what the row says), left out;
    - no true output length in any admission, which is the engine's here; TBT per gap; a transfer overlaps or not for
      all policies alike: these three concern its simulator, not its table.

    Power of the capped H100 is the cap's .7. Memory: 90 % of the GPUs' less the weights."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in data_files.rows("splitwise_sim_perf_model.csv", at):
        groups.setdefault((row["model"], row["hardware"], row["tensor_parallel"]), []).append(row)
    machines = {}
    for (model, hardware, degree), rows in groups.items():
        gpu, gpus = hardware.split("-")[0], int(degree)
        label = gpu + ("-pcap" if hardware.endswith("pcap") else "")
        name = f"splitwise-{label}-{model}-tp{degree}"
        shape, weights = (LLAMA_70B, 140e9) if model == "llama2-70b" else (BLOOM_176B, 352e9)
        capacity = int((_PRICES[gpu].memory_bytes * gpus * 0.9 - weights) / shape.bytes_per_token)
        step_time = TableStepTime(name, _splitwise_parts(rows, mixed))
        machine = _machine(name, gpu, step_time, gpus, capacity, shape)
        if label.endswith("pcap") and machine.watts is not None:
            machine = machine._replace(watts=round(machine.watts * 0.7))
        machines[name] = machine
    return machines


def _splitwise_parts(rows: Sequence[Mapping[str, str]], mixed: Mixed) -> Parts:
    prompts: dict[float, list[float]] = {}
    for row in rows:
        if row["batch_size"] == "1":
            prompts.setdefault(int(row["prompt_size"]), []).append(float(row["prompt_time"]) * 1e-3)
    line = splitwise_decode_line(rows)
    knots = {tokens: median(seconds) for tokens, seconds in prompts.items()}
    return Parts(
        # A step of one prompt token is one of one decode.
        tokens=Curve({0: line.fixed} | knots),
        decodes=_tabled(lambda _: line, (1, _MOST_DECODES)),
        ride=False,
        shared=line.fixed if mixed is Mixed.SHARED else 0.0,
    )


def splitwise_decode_line(rows: Sequence[Mapping[str, str]]) -> DecodeLine:
    """A row's token time is the mean over a run whose context grows from its prompt by its output."""
    measured = []
    for row in rows:
        batch, prompt, output = (int(row[key]) for key in ("batch_size", "prompt_size", "token_size"))
        if row["tensor_parallel"] == "2" and batch == 64:
            continue
        features = (1.0, float(batch), batch * (prompt + output / 2))
        measured.append((features, float(row["token_time"]) * 1e-3))
    return DecodeLine(*cost_weights(measured))


_REGIME = 95  # decodes from which on DistServe's second set of coefficients holds


@cache
def distserve_machines(at: Path | None = None, mixed: Mixed = Mixed.SHARED) -> Mapping[str, MachineModel]:
    """`distserve-a100-opt-{13b,66b}-tp{…}`: DistServe's own coefficients and KV capacities (OSDI 2024; Apache-2.0), one
    pipeline stage. Its two sets for decodes do not meet where they change, and are taken as they are."""
    capacities = {
        (row["model"], row["tp"]): int(row["max_num_tokens"])
        for row in data_files.rows("distserve_max_num_tokens.csv", at)
        if row["pp"] == "1"
    }
    machines = {}
    for model, degrees in json.loads(data_files.text("distserve_a100_80g.json", at)).items():
        for degree, fitted in degrees.items():
            name = f"distserve-a100-{model.removeprefix('facebook/')}-tp{degree}"
            shape = OPT_13B if model.endswith("13b") else OPT_66B
            step_time = TableStepTime(name, _distserve_parts(fitted, mixed))
            machines[name] = _machine(name, "a100", step_time, int(degree), capacities[model, degree], shape)
    return machines


def _distserve_parts(fitted: Mapping[str, Any], mixed: Mixed) -> Parts:
    """Coefficients in ms: of a prefill fixed, a token, a prompt's square; of decodes fixed, a KV token, a decode."""
    fixed, token, square = (value * 1e-3 for value in fitted["prefill"])

    def line(decodes: int) -> DecodeLine:
        which = "decoding_smallbs" if decodes < _REGIME else "decoding_largebs"
        constant, kv, decode = (value * 1e-3 for value in fitted[which])
        return DecodeLine(constant, decode, kv)

    squares = {0: 0.0} | {float(n): square * n * n for n in range(64, 16385, 64)}
    return Parts(
        tokens=Curve({0: fixed, 4096: fixed + token * 4096}),
        decodes=_tabled(line, (1, _REGIME - 1, _REGIME, _MOST_DECODES)),
        ride=False,
        chunk_attention=Curve(squares, power=2),
        # A prompt beside decodes takes no less than they do.
        shared=min(fixed, line(1).fixed) if mixed is Mixed.SHARED else 0.0,
    )


def profiled_machine(
    document: Mapping[str, Any], name: str, kv_capacity_tokens: int, kv_bytes_per_token: int
) -> MachineModel:
    """From the document that `poolwright-engine profile` writes. Raises ValueError."""
    step_time = ProfileStepTime(name, profile_from_document(document))
    return MachineModel(name, step_time, kv_capacity_tokens, kv_bytes_per_token)


def machines(at: Path | None = None) -> Mapping[str, MachineModel]:
    """All that the tables give, by name."""
    return {**kernel_machines(at), **splitwise_machines(at), **distserve_machines(at)}


def machine(name: str, at: Path | None = None) -> MachineModel:
    """Raises KeyError with the names there are."""
    known = machines(at)
    if name not in known:
        raise KeyError(f"there is no machine {name!r} among {', '.join(sorted(known))}")
    return known[name]

"""How much any policy could serve: linear programs over the step times of a machine, as upper bounds.

The fluid bound asks for the least time of steps that together hold the work of an average request. Its dual prices are
the least time that any request's work takes, wherever and beside whatever it runs; with them, the bound of a trace asks
how many of its requests could be on time. Both know the future and move roles and KV at no cost; they know no policy.

They hold because whatever is rounded is rounded in the policies' favour: step times are the simulator's or less, every
number of decodes is tried, prompt tokens and contexts run over all corners of the piecewise linear times, and the
attention of a prompt costs what its chunks cost together however it is cut.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from poolwright.sim.request import Request, Trace
from poolwright.sim.step_time import Chunk
from poolwright.sim.traces import decode_context_tokens

Array = NDArray[np.float64]
Kept = NDArray[np.bool_]

MOST_PROMPT_TOKENS = 8192  # of one step; what an engine's budget may be at most
_MOST_DECODES = 512
_ENTERING = 400  # columns added in one round of pricing
_TOLERANCE = 1e-9


class BoundedTime(Protocol):
    """What a bound needs of a step time. Linear between knots, for each number of decodes."""

    @property
    def prompt_knots(self) -> Array: ...

    @property
    def context_knots(self) -> Array: ...

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float: ...

    def least_seconds(self, prompt_tokens: Array, decodes: int, context_tokens: Array) -> Array:
        """Of a step, without what `prompt_seconds` has."""
        ...

    def prompt_seconds(self, prompt_tokens: int) -> float:
        """What a prompt of that length costs in all its steps together, beyond its tokens."""
        ...


class Shape(StrEnum):
    """Which steps there are: AGGREGATED, no prompt without decodes beside it; DISAGGREGATED, no step with both."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Work:
    """Of one request, or of an average one. `prompt_tokens`: those to compute."""

    prompt_tokens: float
    prompt_seconds: float
    decode_steps: float
    context_tokens: float

    def skewed(self, prompt: float, decode: float) -> "Work":
        return Work(
            self.prompt_tokens * prompt,
            self.prompt_seconds * prompt,
            self.decode_steps * decode,
            self.context_tokens * decode,
        )


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of machine that each unit of work takes at least."""

    prompt_token: float
    decode: float
    context_token: float
    prompt_second: float = 1.0

    def seconds(self, work: Work) -> float:
        return self.prompt(work) + self.decode * work.decode_steps + self.context_token * work.context_tokens

    def prompt(self, work: Work) -> float:
        return self.prompt_token * work.prompt_tokens + self.prompt_second * work.prompt_seconds


@dataclass(frozen=True, slots=True)
class FluidBound:
    """`requests_per_second` of one machine; `columns` (prompt tokens, decodes, context tokens, share of the time) that
    reach it."""

    requests_per_second: float
    prices: Prices
    columns: Sequence[tuple[float, int, float, float]]


@dataclass(frozen=True, slots=True)
class Steps:
    """Kinds of steps that a machine can do within its memory, as columns. `late`: with decodes, above the target."""

    tbt_seconds: float
    prompt_tokens: Array
    decodes: Array
    context_tokens: Array
    seconds: Array

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def late(self) -> Kept:
        return (self.decodes > 0) & (self.seconds > self.tbt_seconds * (1 + _TOLERANCE))

    def where(self, kept: Kept) -> "Steps":
        columns = (self.prompt_tokens, self.decodes, self.context_tokens, self.seconds)
        return Steps(self.tbt_seconds, *(column[kept] for column in columns))


def work_of(time: BoundedTime, request: Request, cached_tokens: int = 0) -> Work:
    """`cached_tokens` of the prompt need no computing; the last one always does."""
    cached = min(cached_tokens, request.prompt_tokens - 1)
    return Work(
        request.prompt_tokens - cached,
        time.prompt_seconds(request.prompt_tokens) - time.prompt_seconds(cached),
        request.output_tokens - 1,
        decode_context_tokens(request.prompt_tokens, request.output_tokens),
    )


def works(time: BoundedTime, trace: Trace, *, prefix_cache: bool = True) -> list[Work]:
    """With a prefix cache that is everywhere and forgets nothing."""
    seen: set[int] = set()
    result = []
    for request in trace:
        cached = 0
        if prefix_cache:
            hits = next((i for i, key in enumerate(request.prefix) if key not in seen), len(request.prefix))
            cached = hits * request.prefix_block_tokens
            seen.update(request.prefix)
        result.append(work_of(time, request, cached))
    return result


def context_range(trace: Trace) -> tuple[float, float]:
    """Of any of its decodes, ever."""
    return min(r.prompt_tokens for r in trace) + 1.0, max(r.prompt_tokens + r.output_tokens for r in trace) - 1.0


def mean(found: Sequence[Work]) -> Work:
    if not found:
        raise ValueError("there is no work to bound")
    count = len(found)
    return Work(
        sum(w.prompt_tokens for w in found) / count,
        sum(w.prompt_seconds for w in found) / count,
        sum(w.decode_steps for w in found) / count,
        sum(w.context_tokens for w in found) / count,
    )


def steps(
    time: BoundedTime,
    kv_capacity_tokens: int,
    tbt_seconds: float = math.inf,
    contexts: tuple[float, float] = (0.0, math.inf),
    most_prompt_tokens: int = MOST_PROMPT_TOKENS,
) -> Steps:
    """All corners: of the pieces of the time, of memory, of the contexts that a decode may have, and of what fits under
    the cap. Steps above it, too."""
    parts: list[tuple[Array, Array, Array, Array]] = []
    for decodes in range(_MOST_DECODES + 1):
        least, most = decodes * contexts[0], min(decodes * contexts[1] if decodes else 0.0, float(kv_capacity_tokens))
        if least > most:
            break
        kv = _contexts(time, decodes, least, most)
        prompts = _prompts(time, decodes, most_prompt_tokens)
        p, c = (axis.ravel() for axis in np.meshgrid(prompts, kv, indexing="ij"))
        parts.append((p, np.full(len(p), float(decodes)), c, time.least_seconds(p, decodes, c)))
        if decodes and math.isfinite(tbt_seconds):
            for p_at, c_at in _at_cap(time, decodes, prompts, kv, tbt_seconds):
                count = len(p_at)
                parts.append((p_at, np.full(count, float(decodes)), c_at, np.full(count, tbt_seconds)))
    found = Steps(tbt_seconds, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    return found.where((found.prompt_tokens > 0) | (found.decodes > 0))


def _contexts(time: BoundedTime, decodes: int, least: float, most: float) -> Array:
    """Corners of the lower convex hull: in between, two steps of other contexts together take no longer."""
    if not decodes:
        return np.zeros(1)
    knots = time.context_knots
    inside = np.unique(np.concatenate([knots[(knots > least) & (knots < most)], [least, most]]))
    values = time.least_seconds(np.zeros(len(inside)), decodes, inside)
    return inside[_lower_hull(inside, values)]


def _lower_hull(x: Array, y: Array) -> list[int]:
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def _prompts(time: BoundedTime, decodes: int, most: int) -> Array:
    """Corners stand at whole steps where decodes count as tokens, and at whole prompts where they do not; trying both
    costs columns and nothing else."""
    knots = time.prompt_knots
    tried = np.concatenate([[0.0, 1.0, float(most)], knots, knots - decodes])
    return np.unique(tried[(tried >= 0) & (tried <= most)])


def _at_cap(
    time: BoundedTime, decodes: int, prompts: Array, contexts: Array, cap: float
) -> Iterator[tuple[Array, Array]]:
    """Where an edge between two corners passes the cap."""
    p, c = np.meshgrid(prompts, contexts, indexing="ij")
    seconds = time.least_seconds(p.ravel(), decodes, c.ravel()).reshape(p.shape)
    for axis, grid in ((0, p), (1, c)):
        low, high = (np.take(seconds, range(*span), axis) for span in _spans(seconds.shape[axis]))
        crossing = (low <= cap) & (high > cap)
        if axis == 0:
            crossing[0] &= False  # from no prompt to the first token, the time jumps
        start, stop = (np.take(grid, range(*span), axis)[crossing] for span in _spans(seconds.shape[axis]))
        share = (cap - low[crossing]) / (high[crossing] - low[crossing])
        other = np.take(c if axis == 0 else p, range(*_spans(seconds.shape[axis])[0]), axis)[crossing]
        at = start + share * (stop - start)
        yield (at, other) if axis == 0 else (other, at)


def _spans(length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, length - 1), (1, length)


def fluid(found: Steps, work: Work, *, shape: Shape = Shape.ANY, late_share: float = 0.0) -> FluidBound:
    """The most requests a second that one machine of a large cluster can serve, each with the average `work`.

    `late_share` of the gaps may be longer than the target of the steps; 0: none. Raises ValueError where no step keeps
    it."""
    kept = np.full(len(found), True)
    if shape is Shape.AGGREGATED:
        kept &= (found.decodes > 0) | (found.prompt_tokens == 0)
    elif shape is Shape.DISAGGREGATED:
        kept &= (found.decodes == 0) | (found.prompt_tokens == 0)
    if late_share <= 0:
        kept &= ~found.late
    found = found.where(kept)
    is_capped = math.isfinite(found.tbt_seconds)

    wanted = [(found.prompt_tokens, work.prompt_tokens), (found.decodes, work.decode_steps)]
    wanted.append((found.context_tokens, work.context_tokens))
    if late_share > 0:
        wanted.append((found.decodes * (late_share - found.late), 0.0))
    attention = len(wanted) if shape is Shape.AGGREGATED and is_capped and late_share <= 0 else None
    if attention is not None:
        # A prompt's attention has room only in steps of decodes, below the cap.
        room = np.where(found.prompt_tokens > 0, np.maximum(found.tbt_seconds - found.seconds, 0.0), 0.0)
        wanted.append((room, work.prompt_seconds))
    seconds, duals, used = _least(found.seconds, np.array([row for row, _ in wanted]), [need for _, need in wanted])
    total = seconds + work.prompt_seconds
    columns = [
        (float(found.prompt_tokens[i]), int(found.decodes[i]), float(found.context_tokens[i]), share)
        for i, share in ((i, x * found.seconds[i] / total) for i, x in used)
    ]
    prices = Prices(duals[0], duals[1], duals[2], 1.0 + (duals[attention] if attention is not None else 0.0))
    return FluidBound(1.0 / total if total > 0 else math.inf, prices, columns)


def _least(costs: Array, rows: Array, needs: Sequence[float]) -> tuple[float, list[float], list[tuple[int, float]]]:
    """min costs · x with rows · x ≥ needs, by columns as their prices call for them."""
    scale = np.array([max(float(np.abs(row).max()), 1e-300) for row in rows])
    scaled = rows / scale[:, None]
    bounds = np.array(needs) / scale
    active = np.unique(np.concatenate([np.argsort(costs / np.maximum(row, 1e-12))[:_ENTERING] for row in scaled]))
    while True:
        solved = _solve(costs[active], A_ub=-scaled[:, active], b_ub=-bounds)
        if solved is None:
            entering = np.setdiff1d(np.arange(len(costs)), active)
            if not len(entering):
                raise ValueError("no step keeps the TBT target")
            active = np.union1d(active, entering)
            continue
        duals = -solved.prices
        reduced = costs - duals @ scaled
        worst = np.argsort(reduced)[:_ENTERING]
        entering = np.setdiff1d(worst[reduced[worst] < -_TOLERANCE * float(costs.max())], active)
        if not len(entering):
            break
        active = np.union1d(active, entering)
    used = [(int(i), float(x)) for i, x in zip(active, solved.x, strict=True) if x > 0]
    return solved.value, [float(price) for price in duals / scale], used


@dataclass(frozen=True, slots=True)
class _Solved:
    value: float
    x: Array
    prices: Array


def _solve(costs: Array, **program: Any) -> _Solved | None:
    """None where nothing is feasible. HiGHS."""
    solved: Any = linprog(costs, **program, method="highs")
    if solved.status == 2:
        return None
    if solved.status != 0:
        raise RuntimeError(f"the linear program was not solved: {solved.message}")
    return _Solved(float(solved.fun), solved.x, solved.ineqlin.marginals)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When a request is on time: its first token by TTFT, and each gap at most `tbt_seconds`; of the gaps, the share
    `late_share` may be longer, a whole number of them for each request (percentiles by nearest rank).

    `longest_gap_seconds`: the bound is of policies that let no gap of a request on time be longer, which their outcomes
    show. Without one, a single late gap may last to the end of all, and the work after it has no deadline."""

    tbt_seconds: float
    ttft_seconds: float
    ttft_seconds_per_token: float = 0.0
    late_share: float = 0.0
    longest_gap_seconds: float = math.inf

    def steps_seconds(self, steps: int, late: int) -> float:
        """The most that the first `steps` gaps of a request take."""
        slow = min(steps, late)
        return (steps - slow) * self.tbt_seconds + (slow * self.longest_gap_seconds if slow else 0.0)


@dataclass(frozen=True, slots=True)
class TraceBound:
    """`on_time`: at most that many requests, of all. `on_time_share` of them."""

    on_time: float
    requests: int

    @property
    def on_time_share(self) -> float:
        return self.on_time / self.requests


_ENOUGH = 1e-3  # of the requests: a round that sharpens a bound by less is the last
_CUTS = 12  # intervals that one round adds, for each vector of prices
_PIECES = 4  # of a request's decodes: each has its own window, for one request is on one machine at a time
_SKEWS = ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.0, 0.0), (0.0, 1.0))  # of (prompt, decode) work, for other prices


def finite(
    time: BoundedTime,
    kv_capacity_tokens: int,
    machines: int,
    trace: Trace,
    deadlines: Deadlines,
    *,
    interval_seconds: float = 1.0,
    prefix_cache: bool = True,
    most_prompt_tokens: int | None = None,
) -> TraceBound:
    """How many requests of a trace `machines` could serve on time, if all others were left out.

    For every interval between two points `interval_seconds` apart and every vector of prices, the work that has to be
    done within it has to fit: Σ y_j · price(work of j there) ≤ machines · interval, 0 ≤ y_j ≤ 1. A single machine that
    may leave and take up any work at any time needs no more than that (EDF), so no flow is needed. Intervals enter the
    program as they are violated. Machines that are pipelines are not meant."""
    if not len(trace):
        raise ValueError(f"{trace.name} has no requests")
    found = works(time, trace, prefix_cache=prefix_cache)
    # Some engines take a prompt whole, however long it is.
    most = most_prompt_tokens or max([MOST_PROMPT_TOKENS, *(request.prompt_tokens for request in trace)])
    parts = _parts(time, trace, found, deadlines, most)
    possible = parts.possible
    if not possible.any():
        return TraceBound(0.0, len(trace))
    # A step above the target is any step where some gaps may be late: which, an interval does not know.
    cap = deadlines.tbt_seconds if not parts.may_be_late else math.inf
    kinds = steps(time, kv_capacity_tokens, cap, context_range(trace), most)
    average = mean([work for work, can in zip(found, possible, strict=True) if can])
    prices = [fluid(kinds, average.skewed(*skew)).prices for skew in _SKEWS]
    end = max(trace.horizon_seconds, float(parts.due[np.isfinite(parts.due)].max(initial=0.0)))
    points = np.arange(0.0, end + interval_seconds, interval_seconds)
    demands = [_Demand(points, parts, parts.seconds(price)) for price in prices]

    y = possible.astype(float)
    rows: list[csr_array] = []
    limits: list[float] = []
    while True:
        for demand in demands:
            for start, stop in demand.violated(y, machines):
                rows.append(demand.row(start, stop))
                limits.append(machines * (points[stop] - points[start]))
        if not rows:
            return TraceBound(float(y.sum()), len(trace))
        variables = np.stack([np.zeros(len(y)), possible], 1)
        solved = _solve(-np.ones(len(y)), A_ub=vstack(rows), b_ub=limits, bounds=variables)
        assert solved is not None  # y = 0 is feasible
        # Each round gives a bound; the next ones only sharpen it.
        gained = float(y.sum()) + solved.value
        y = solved.x
        if gained <= _ENOUGH * len(trace):
            return TraceBound(float(y.sum()), len(trace))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of requests, one prompt and `_PIECES` of decodes each: the window that it has to be done in, and its work."""

    request: NDArray[np.int64]
    release: Array
    due: Array
    prompt_tokens: Array
    prompt_seconds: Array
    decode_steps: Array
    context_tokens: Array
    possible: Kept  # by request
    may_be_late: bool

    def seconds(self, prices: Prices) -> Array:
        return (
            prices.prompt_token * self.prompt_tokens
            + prices.prompt_second * self.prompt_seconds
            + prices.decode * self.decode_steps
            + prices.context_token * self.context_tokens
        )


def _parts(
    time: BoundedTime, trace: Trace, found: Sequence[Work], deadlines: Deadlines, most_prompt_tokens: int
) -> _Parts:
    possible = np.full(len(trace), True)
    rows: list[tuple[float, ...]] = []
    may_be_late = False
    quickest = quickest_prompts(time, found, most_prompt_tokens).tolist()
    for j, (request, work, least) in enumerate(zip(trace, found, quickest, strict=True)):
        arrival, gaps = request.arrival_seconds, request.output_tokens - 1
        due = arrival + deadlines.ttft_seconds + deadlines.ttft_seconds_per_token * request.prompt_tokens
        late = math.floor(deadlines.late_share * gaps + _TOLERANCE)
        may_be_late |= late > 0
        step = time.seconds((), 1, request.prompt_tokens) if gaps else 0.0
        # With none late, not even the last one, whose context is the longest.
        kv = request.prompt_tokens + (gaps if not late else 1)
        if arrival + least > due or (late < gaps and time.seconds((), 1, kv) > deadlines.tbt_seconds):
            possible[j] = False
            continue
        rows.append((j, arrival, due, work.prompt_tokens, work.prompt_seconds, 0.0, 0.0))
        done = 0
        for piece in range(1, _PIECES + 1):
            stop = gaps * piece // _PIECES
            if stop == done:
                continue
            context = decode_context_tokens(request.prompt_tokens, stop + 1)
            context -= decode_context_tokens(request.prompt_tokens, done + 1)
            last = due + deadlines.steps_seconds(stop, late)
            rows.append((j, arrival + least + done * step, last, 0.0, 0.0, stop - done, context))
            done = stop
    request_of, *columns = np.array(rows, float).reshape(-1, 7).T
    release, due_at, prompt_tokens, prompt_seconds, decode_steps, context_tokens = columns
    return _Parts(
        request_of.astype(np.int64),
        release,
        due_at,
        prompt_tokens,
        prompt_seconds,
        decode_steps,
        context_tokens,
        possible,
        may_be_late,
    )


def quickest_prompts(time: BoundedTime, found: Sequence[Work], most_prompt_tokens: int = MOST_PROMPT_TOKENS) -> Array:
    """On one machine that does nothing else. However a prompt is cut, no token takes less than it does in the best step
    that is not longer than the prompt; those are the corners, and the whole."""
    tokens = np.array([max(1.0, work.prompt_tokens) for work in found])
    whole = np.minimum(tokens, most_prompt_tokens)
    corners = _prompts(time, 0, most_prompt_tokens)[1:]
    best = np.minimum.accumulate(time.least_seconds(corners, 0, np.zeros(len(corners))) / corners)
    shorter = np.searchsorted(corners, whole, side="right") - 1
    rate = np.minimum(best[shorter], time.least_seconds(whole, 0, np.zeros(len(whole))) / whole)
    result: Array = tokens * rate + np.array([work.prompt_seconds for work in found])
    return result


class _Demand:
    """Of one vector of prices: what has to be done between two points, for all pairs of them."""

    def __init__(self, points: Array, parts: _Parts, seconds: Array) -> None:
        self._points = points
        self._requests = len(parts.possible)
        inside = np.isfinite(parts.due) & (seconds > 0)
        self._request = parts.request[inside]
        self._seconds = seconds[inside]
        # The interval holds a window from the last point before it to the first after it.
        self._first = np.searchsorted(points, parts.release[inside], side="right") - 1
        self._last = np.searchsorted(points, parts.due[inside], side="left")

    def violated(self, y: Array, machines: int) -> list[tuple[int, int]]:
        """The most violated interval of each start, of some starts."""
        size = len(self._points) + 1
        weights = self._seconds * y[self._request]
        flat = np.bincount(self._first * size + self._last, weights, size * size)
        held = np.cumsum(flat.reshape(size, size)[::-1], axis=0)[::-1].cumsum(axis=1)[: size - 1, : size - 1]
        over = held - machines * np.maximum(self._points[None, :] - self._points[:, None], 0.0)
        over[np.tri(size - 1, k=0, dtype=bool)] = -math.inf
        stops = over.argmax(axis=1)
        worst = over[np.arange(size - 1), stops]
        starts = np.argsort(-worst)[:_CUTS]
        allowed = 1e-6 * machines * (1.0 + self._points[stops[starts]] - self._points[starts])
        return [(int(s), int(stops[s])) for s, some in zip(starts, allowed, strict=True) if worst[s] > some]

    def row(self, start: int, stop: int) -> csr_array:
        held = (self._first >= start) & (self._last <= stop)
        weights = np.bincount(self._request[held], self._seconds[held], self._requests)
        return csr_array(weights[None, :])

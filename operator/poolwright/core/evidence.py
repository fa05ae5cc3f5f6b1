"""The numbers that a decision was made on, as texts."""

import math
from collections.abc import Sequence

from poolwright.core.board import Board
from poolwright.core.decision import ObjectiveReading, Snapshot
from poolwright.core.demand import Demand
from poolwright.core.objective import Load
from poolwright.core.pricing import MachinePrices, Prices
from poolwright.core.reading import MetricsState
from poolwright.core.split import Counts
from poolwright_protocol.roles import Role

_PRICED_TOKENS = 512


def evidence(
    snapshot: Snapshot,
    objectives: Sequence[ObjectiveReading],
    load: Load,
    counts: Counts,
    demand: Demand | None,
    board: Board,
) -> tuple[tuple[str, str], ...]:
    reading = snapshot.reading
    lines = [
        ("split", "/".join(str(counts[r]) for r in (Role.PROMPT, Role.TOKEN, Role.MIXED))),
        ("metrics", reading.state.value),
    ]
    for o in objectives:
        share = "" if o.share_under_target is None else f", {o.share_under_target:.0%} under"
        bound = ">= " if o.at_least else ""
        queued = "" if o.queued is None else f", queueing {o.queued:.2f} of what the target leaves for it"
        lines.append(
            (
                o.name,
                f"{o.state.value}: {bound}{seconds_text(o.observed_seconds)} of {seconds_text(o.target_seconds)}"
                f"{share}, {o.samples:.0f} samples{queued}",
            )
        )
    numbers = (reading.arrivals, reading.window_seconds, reading.in_flight, reading.oldest_waiting_seconds)
    if reading.state in (MetricsState.COMPLETE, MetricsState.PARTIAL) and all(map(math.isfinite, numbers)):
        lines += [
            ("arrivals", f"{reading.arrivals:.0f} in {reading.window_seconds:.0f} s"),
            ("in-flight", f"{reading.in_flight:.0f}"),
            ("oldest-waiting", seconds_text(reading.oldest_waiting_seconds)),
            ("before-first-token", f"{load.requests_before_first_token:.2f} requests"),
            ("decoding", f"{load.streams:.2f} streams"),
        ]
    if snapshot.prices:
        lines.append(("prices", prices_text(snapshot.prices)))
    if surplus := board.surplus():
        lines.append(("beyond-budget", f"{surplus} machine(s) wait for a role until others of their class have gone"))
    if board.reach is not None:
        rate = board.reach.kv_bytes_per_second
        made = "KV at an unknown rate" if rate is None else f"{rate / 1e9:.3g} GB/s of KV"
        without = f"{board.without_way()} of {counts[Role.PROMPT]} prompt machines have no way for it"
        lines.append(("links", f"{made}; {without}"))
    if demand is not None:
        by_class = board.counts_by_class()
        offered, pressure = demand.offered, demand.pressure(by_class)
        wanted = demand.machines_wanted(by_class)
        lines += [
            ("offered", f"{offered.requests_per_second:.2f} requests/s of {offered.prompt_tokens:.0f} prompt tokens"),
            (
                "answers",
                f"{offered.output_tokens:.0f} tokens each, counts stray by {offered.dispersion:.1f} of Poisson",
            ),
            ("pressure", str(pressure)),
            ("machines-wanted", "no number would do" if math.isinf(wanted) else f"{wanted:+.1f}"),
        ]
    return tuple(lines)


def prices_text(prices: Prices) -> str:
    return "; ".join(_price_text(name, of_class) for name, of_class in prices.items())


def _price_text(name: str, prices: MachinePrices) -> str:
    """Of a class: what most prompts and a lone stream would pay."""
    prompt_token, step = (
        prices.prefill_seconds(_PRICED_TOKENS) / _PRICED_TOKENS,
        prices.decode_seconds(1, _PRICED_TOKENS),
    )
    return f"{name} {prompt_token * 1000:.3g} ms a prompt token, {step * 1000:.3g} ms a step of one stream"


def seconds_text(value: float | None) -> str:
    if value is None:
        return "nothing observed"
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


def times_text(value: float | None) -> str:
    return "more than any" if value is None or math.isinf(value) else f"{value:.2f}x"

"""What the demo promised, whether it held, and if not: what the policy said, and whether the machine had slowed down.

Judges and prints; starts nothing and measures nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from poolwright.local.traffic import Outcome, percentile, ttfts

# Over the unloaded TTFT that the load was chosen by. An idle pool asked again differs by less than half; prompts that
# keep a prompt machine two thirds busy take about twice as long as alone.
BUSY_UNLOADED = 2.0
BUSY_LOADED = 4.0


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase of one run gave. Times are the loop's clock; `moves` and `decisions` are those of the status, in
    it. `ttft_unloaded` was measured again when the phase had ended; None where that request failed."""

    name: str
    metric: str
    percentile: int
    target_seconds: float
    outcomes: Sequence[Outcome]
    started_at: float
    settled_from: float
    moves: Sequence[Mapping[str, Any]]
    first_move_at: float | None
    decisions: Sequence[Mapping[str, Any]] = ()
    ttft_unloaded: float | None = None

    def values(self, start: float, end: float) -> list[float]:
        """Samples of the phase's metric that belong to [start, end): a TTFT by its arrival, a gap by its end."""
        if self.metric == "TTFT":
            return ttfts(o for o in self.outcomes if start <= o.started_at < end)
        return [
            gap for o in self.outcomes for gap, at in zip(o.gaps_seconds, o.gap_ends, strict=True) if start <= at < end
        ]

    @property
    def before(self) -> list[float]:
        return self.values(self.started_at, self.first_move_at or self.settled_from)

    @property
    def after(self) -> list[float]:
        return self.values(self.settled_from, float("inf"))

    @property
    def met(self) -> bool:
        observed = percentile(self.after, self.percentile)
        return observed is not None and observed <= self.target_seconds

    def moves_into(self, role: str) -> int:
        return sum(1 for m in self.moves if m["to"] == role and m.get("outcome") == "Completed")


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over both phases: prompt-heavy, decode-heavy."""

    mode: str
    phases: Sequence[Phase]
    requests: int
    failures: Sequence[str]

    def moves_into(self, role: str) -> int:
        return sum(phase.moves_into(role) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Promise:
    kept: str
    broken: str
    holds: bool
    phase: Phase | None = None  # whose decisions say why it was broken


def promises(runs: Sequence[Run]) -> list[Promise]:
    """The last run is that in mode Active."""
    active, failures = runs[-1], [error for run in runs for error in run.failures]
    prompt_heavy, decode_heavy = active.phases
    found = [
        Promise(
            "no request failed", f"{len(failures)} requests failed, the first: {next(iter(failures), '')}", not failures
        )
    ]
    # Half a step is a step too: a prompt machine that turns mixed generates tokens.
    for phase, roles in ((prompt_heavy, ("Prompt",)), (decode_heavy, ("Token", "Mixed"))):
        pool = " or ".join(roles).lower()
        moved = any(active.moves_into(role) > 0 for role in roles)
        found.append(
            Promise(f"a machine moved into the {pool} pool", f"no machine moved into the {pool} pool", moved, phase)
        )
        observed = percentile(phase.after, phase.percentile)
        seen = "nothing was measured" if observed is None else f"{observed * 1000:.0f} ms"
        target = f"P{phase.percentile} of {phase.metric}"
        limit = f"{phase.target_seconds * 1000:.0f} ms"
        found.append(
            Promise(
                f"at the end of the {phase.name} {target} was within its target: {seen} of {limit}",
                f"at the end of the {phase.name} {target} missed its target: {seen}, not {limit}",
                phase.met,
                phase,
            )
        )
    if len(runs) > 1:
        found.append(
            Promise(
                "the same traffic missed the TTFT target where no machine may move (Paused)",
                "the same traffic met the TTFT target although no machine might move (Paused): it was too light",
                not runs[0].phases[0].met,
            )
        )
    return found


def slowed(ttft_unloaded: float, runs: Sequence[Run]) -> str | None:
    """How much slower the machine was than when the load was chosen for it; None where it was not."""
    for phase in (phase for run in runs for phase in run.phases):
        again, loaded = phase.ttft_unloaded, percentile(ttfts(phase.outcomes), 50)
        chosen = f"a first token took {ttft_unloaded * 1000:.0f} ms without load when the traffic was chosen"
        if again is not None and again > BUSY_UNLOADED * ttft_unloaded:
            return f"{chosen}, and {again * 1000:.0f} ms without load after the {phase.name}"
        # There prompts are no bottleneck with any split: only a slower machine makes them wait so long.
        if phase.metric == "TBT" and loaded is not None and loaded > BUSY_LOADED * ttft_unloaded:
            return f"{chosen}, and {loaded * 1000:.0f} ms (P50) in the {phase.name}, which keeps no prompt machine full"
    return None


def summarize(console: Console, ttft_unloaded: float, runs: Sequence[Run], memory: Mapping[str, int | None]) -> bool:
    """Print it; True when every promise holds."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    console.print("\nSummary", style="bold")
    for run in runs:
        for phase in run.phases:
            for line in _phase_lines(run.mode, phase):
                say(line)
    failures = [error for run in runs for error in run.failures]
    say(f"Requests: {sum(run.requests for run in runs)}, failed: {len(failures)}")
    say("Memory (MiB): " + ", ".join(f"{n} {m}" for n, m in sorted(memory.items())))
    made = promises(runs)
    for promise in made:
        say(f"[green]✓ {escape(promise.kept)}[/]" if promise.holds else f"[red]✗ {escape(promise.broken)}[/]")
    broken = [promise for promise in made if not promise.holds]
    if not broken:
        say("Every promise was kept.")
        return True
    for phase in runs[-1].phases:
        if any(promise.phase is phase for promise in broken):
            for line in _decision_lines(phase):
                say(line)
    if slow := slowed(ttft_unloaded, runs):
        say(f"[yellow]Inconclusive: this machine was busy:[/] {escape(slow)}. Run it again when nothing else does.")
    else:
        say("[red]Not every promise was kept.[/]")
    return False


def _phase_lines(mode: str, phase: Phase) -> Iterator[str]:
    verdict = "[green]met[/]" if phase.met else "[red]missed[/]"
    yield f"  The {phase.name} (mode {mode})"
    yield f"    target: P{phase.percentile} of {phase.metric} at most {phase.target_seconds * 1000:.0f} ms: {verdict}"
    moved = ", ".join(_move(m) for m in phase.moves)
    yield f"    moves: {escape(moved) or 'none'}"
    before = "before the first move" if phase.first_move_at is not None else "until its last part"
    yield f"    {phase.metric} {before}: {_percentiles(phase.before)}"
    yield f"    {phase.metric} of its last part: {_percentiles(phase.after)}"


def _move(move: Mapping[str, Any]) -> str:
    """A machine that had no role before has no `from`."""
    machine = f"{move['machine']} " if "machine" in move else ""
    outcome = move.get("outcome", "still running")
    return f"{machine}{move.get('from', 'no role')} → {move['to']}" + (
        "" if outcome == "Completed" else f" ({outcome})"
    )


def _decision_lines(phase: Phase) -> Iterator[str]:
    yield f"What the policy decided in the {phase.name}:"
    for decision in phase.decisions:
        yield escape(f"    {decision['time']} {decision['reason']}: {decision['message']}")
    if not phase.decisions:
        yield "    nothing: it was not asked, or had no metrics"


def _percentiles(values: Sequence[float]) -> str:
    shown = [percentile(list(values), p) for p in (50, 90, 99)]
    if shown[0] is None:
        return "no samples"
    return ", ".join(f"P{p} {(v or 0) * 1000:.0f}" for p, v in zip((50, 90, 99), shown, strict=True)) + (
        f" ms of {len(values)} samples"
    )

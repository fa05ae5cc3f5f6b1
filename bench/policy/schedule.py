"""Which runs a comparison needs, in which order, given what is known: stages, of which each may look at those before.

Computes nothing. The same results give the same schedule, so that an interrupted comparison goes on where it was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.policy import contenders
from bench.policy.cells import AS_IT_IS, Capacity, Cell, Twist
from bench.policy.contenders import OURS
from bench.policy.known import Known
from bench.policy.runs import Kind, Run

from poolwright.sim.traces import Copies

# A policy that is so far behind ours in the first draw is not drawn again.
FAR_BEHIND = 0.05
SPLITS_DRAWN_AGAIN = 2
SHUFFLED_SEEDS = 2
SHUFFLED_RIVALS = 2
ALL_SPLITS_UP_TO = 4  # machines; with more, coarse first and then around the best
FIRST_GRID = 6  # splits of the coarse sweep
QUICK_POLICIES = ("sarathi", "splitwise", "narwhal")
# For `--full` only, so that the default fits its time: other forms of a source that is there, batching that was
# superseded by a policy that is there, and a fixed ratio, which on a fixed number of machines is a static split.
FULL_ONLY = (
    "xllm-as-published",
    "splitwise-sim",
    "dynamo-throughput",
    "dynamo-latency",
    "dynamo-2025",
    "orca",
    "static-batching",
    "heteroscale",
)
# The search is for the cells of which something is to be shown beside it.
CLAIRVOYANT_MACHINES, CLAIRVOYANT_CAP = 4, 3.0

Stages = Iterator[Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Effort:
    """`policies`: the published ones. `references`: the bounds, the clairvoyant search and the shuffled row."""

    policies: Sequence[str]
    seeds: int
    references: bool


DEFAULT = Effort(tuple(name for name in contenders.PUBLISHED if name not in FULL_ONLY), 5, True)
QUICK = Effort(QUICK_POLICIES, 2, False)
FULL = Effort(contenders.PUBLISHED, 5, True)


@dataclass(frozen=True, slots=True)
class Questions:
    """Runs of one cell, once its capacity is known."""

    cell: Cell
    able: Capacity
    known: Known

    def policy(self, name: str, seed: int, copies: Copies = Copies.JITTERED, twist: Twist = AS_IT_IS) -> Run:
        return Run(Kind.POLICY, self.cell, name, seed, copies, twist, self.able)

    def value(self, name: str, seed: int, copies: Copies = Copies.JITTERED, twist: Twist = AS_IT_IS) -> float | None:
        return self.known.value(self.policy(name, seed, copies, twist))

    def bound(self, seed: int) -> Run:
        """Of policies whose longest gap is what was seen; coarse, so that a run more seldom asks for another one."""
        longest = 0.125
        while longest < self._longest_gap(seed):
            longest *= 2
        return Run(Kind.BOUND, self.cell, seed=seed, able=self.able, longest_gap_seconds=longest)

    def _longest_gap(self, seed: int) -> float:
        names = [OURS, *contenders.PUBLISHED, *self.splits_known()]
        plain = [self.policy(name, seed, twist=twist) for name in names for twist in (AS_IT_IS, Twist(knows=True))]
        found = [self.known(run) for run in (*plain, self.clairvoyant(seed))]
        return max((result.longest_gap_seconds for result in found if result is not None), default=0.0)

    def clairvoyant(self, seed: int) -> Run:
        return Run(Kind.CLAIRVOYANT, self.cell, seed=seed, able=self.able)

    def splits_known(self, seed: int = 1) -> list[str]:
        """Of the sweep, best first."""
        found = [(self.value(name, seed), name) for name in self._every_split()]
        known = [(value, name) for value, name in found if value is not None]
        return [name for _, name in sorted(known, key=lambda row: -row[0])]

    def _every_split(self) -> list[str]:
        prompts = range(self.cell.machines + 1)
        mixed = [f"static:0/0/{self.cell.machines}"]
        return [name for m in (0, 1) for name in contenders.splits(self.cell, prompts, m)] + mixed

    def sweep(self) -> Stages:
        """In hindsight, on the first draw."""
        every = self._every_split()
        if self.cell.machines <= ALL_SPLITS_UP_TO:
            yield [self.policy(name, 1) for name in every]
            return
        step = -(-self.cell.machines // FIRST_GRID)
        prompts = range(step // 2 or 1, self.cell.machines, step)
        yield [self.policy(name, 1) for name in (*contenders.splits(self.cell, prompts, 0), every[-1])]
        last = ""
        while True:
            step = max(1, step // 2)
            pools = [name for name in self.splits_known() if name != every[-1]]
            if not pools or pools[0] == last:
                return
            last = pools[0] if step == 1 else ""
            best = contenders.split_of(pools[0], self.cell)[0]
            near = (best - step, best, best + step)
            names = [*contenders.splits(self.cell, near, 0), *contenders.splits(self.cell, near, 1)]
            yield [self.policy(name, 1) for name in names if name in every]

    def rivals(self, policies: Iterable[str], copies: Copies = Copies.JITTERED) -> list[str]:
        """Not far behind ours in the first draw, the best first."""
        own = self.value(OURS, 1, copies)
        found = [(self.value(name, 1, copies), name) for name in policies]
        near = [(v, name) for v, name in found if v is not None and (own is None or v > own - FAR_BEHIND)]
        return [name for _, name in sorted(near, key=lambda row: -row[0])]


def capacity_of(cell: Cell) -> Run:
    return Run(Kind.CAPACITY, cell)


def questions(cell: Cell, known: Known) -> Questions | None:
    """None before its capacity is known, or where it has none."""
    found = known(capacity_of(cell))
    return None if found is None or found.value is None else Questions(cell, found.capacity, known)


def comparison(cell: Cell, known: Known, effort: Effort) -> Stages:
    """Nothing may be asked of a stage's results before it was yielded."""
    yield [capacity_of(cell)]
    asked = questions(cell, known)
    if asked is None:
        return
    seeds = range(1, effort.seeds + 1)
    yield [asked.policy(OURS, seed) for seed in seeds]
    yield [asked.policy(name, 1) for name in effort.policies]
    yield from asked.sweep()
    again = [*asked.rivals(effort.policies), *asked.splits_known()[:SPLITS_DRAWN_AGAIN]]
    yield [asked.policy(name, seed) for seed in seeds for name in again]
    if cell.admission:
        yield [asked.policy(with_admission(OURS), seed) for seed in seeds]
        behind = [with_admission(name) for name in effort.policies]
        yield [asked.policy(name, 1) for name in behind]
    if not effort.references:
        return
    copies = Copies.SHUFFLED
    row = [OURS, *asked.splits_known()[:1], *asked.rivals(effort.policies)[:SHUFFLED_RIVALS]]
    yield [asked.policy(name, seed, copies) for name in row for seed in range(1, SHUFFLED_SEEDS + 1)]
    if not cell.nine:
        knowing = [OURS, *asked.rivals(effort.policies)[:1], *asked.splits_known()[:1]]
        yield [asked.policy(name, 1, twist=Twist(knows=True)) for name in knowing]
        yield [asked.bound(1)]
        if has_clairvoyant(cell):
            yield [asked.clairvoyant(1)]
            yield [asked.bound(1)]


def has_clairvoyant(cell: Cell) -> bool:
    return cell.machines >= CLAIRVOYANT_MACHINES and (cell.cap or 0.0) >= CLAIRVOYANT_CAP


def with_admission(name: str) -> str:
    return f"{name}:admission=on" if name == OURS else f"{name}+predicted"


def narrow(cell: Cell, known: Known, policies: Sequence[str], seeds: Sequence[int], copies: Copies) -> Stages:
    yield [capacity_of(cell)]
    asked = questions(cell, known)
    if asked is not None:
        yield [asked.policy(name, seed, copies) for name in policies for seed in seeds]


def shortened(cell: Cell, seconds: float) -> Cell:
    """The same with less of the trace; what happens to it happens as much earlier."""
    scale = seconds / cell.seconds
    burst, lost, flood = cell.burst, cell.lost, cell.flood
    back = None if lost is None or lost.back_after_seconds is None else lost.back_after_seconds * scale
    return replace(
        cell,
        seconds=seconds,
        every_seconds=cell.every_seconds * scale,
        burst=burst and replace(burst, at_seconds=burst.at_seconds * scale),
        lost=lost and replace(lost, at_seconds=lost.at_seconds * scale, back_after_seconds=back),
        flood=flood and replace(flood, at_seconds=flood.at_seconds * scale, hold_seconds=flood.hold_seconds * scale),
    )


MakeStages = Callable[[Cell], Stages]


def missing(stages: Stages, known: Known) -> tuple[int, list[Run]] | None:
    """The first stage that is not known in whole, and what of it is not."""
    for number, stage in enumerate(stages):
        lacking = [run for run in stage if known(run) is None]
        if lacking:
            return number, lacking
    return None

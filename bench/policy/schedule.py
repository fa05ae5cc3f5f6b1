"""Which runs a comparison needs, in which order, given what is known: stages, of which each may look at those before.

Computes nothing. The same results give the same schedule, so that an interrupted comparison goes on where it was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.policy import contenders
from bench.policy.cells import AS_IT_IS, Capacity, Cell, Twist
from bench.policy.contenders import HELD, OURS, SHIPPED, STATIC
from bench.policy.known import Known
from bench.policy.runs import Kind, Result, Run, Search

from poolwright.sim.traces import Copies

# A policy that is so far behind ours in the first draw is not drawn again.
FAR_BEHIND = 0.05
# A policy that is so far behind ours in the first part of the first draw is not run to its end. That is a quarter; of a
# cell that changes a third, with all that happens sooner.
FAR_BEHIND_IN_PART = 0.15
PART, PART_OF_CHANGES = 1 / 4, 1 / 3
SPLITS_DRAWN = 3
SPLITS_DRAWN_AGAIN = 2
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
# Something is to be shown beside the search in these.
CLAIRVOYANT_MACHINES, CLAIRVOYANT_CAP = 4, 3.0

Stages = Iterator[Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Effort:
    """`policies`: the published ones. `search`: of clairvoyant, in cells of at most `searched_machines`; beside it, so
    many rivals are told the future. `in_part`: who is far behind in the first part is not run to its end. `everywhere`:
    policies far behind are drawn again, every cell has the column of admission, both sweeps are whole, and shuffled
    copies have bounds."""

    policies: Sequence[str]
    seeds: int
    search: Search = Search.COARSE
    searched_machines: int = 8
    knowing_rivals: int = 3
    shuffled_seeds: int = 5
    in_part: bool = True
    everywhere: bool = False


DEFAULT = Effort(tuple(name for name in contenders.PUBLISHED if name not in FULL_ONLY), 5)
QUICK = Effort(QUICK_POLICIES, 2, searched_machines=2, knowing_rivals=1, shuffled_seeds=0, in_part=False)
FULL = Effort(
    (*contenders.PUBLISHED, *(f"{name}:router=queue" for name in contenders.OUR_ROUTER), "distserve:parallelism=same"),
    5,
    Search.EXHAUSTIVE,
    searched_machines=40,
    knowing_rivals=len(contenders.PUBLISHED),
    in_part=False,
    everywhere=True,
)


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

    def part(self, name: str) -> Run:
        """The first part of the first draw."""
        return replace(self.policy(name, 1), cell=in_part(self.cell))

    def behind_in_part(self, name: str) -> float | None:
        """How far behind ours; None where it is not known."""
        own, other = (self.known.value(self.part(one)) for one in (OURS, name))
        return None if own is None or other is None else own - other

    def near(self, names: Iterable[str]) -> list[str]:
        """Those that are not far behind in part, or of which no part is known."""
        behind = [(self.behind_in_part(name) or 0.0, name) for name in names]
        return [name for by, name in behind if by <= FAR_BEHIND_IN_PART]

    def bound(self, seed: int, copies: Copies = Copies.JITTERED) -> Run:
        """Of policies whose longest gap is what was seen; coarse, so that a run more seldom asks for another one."""
        gaps = [result.longest_gap_seconds for result in self.bounded(seed, copies).values()]
        longest = 0.125
        while longest < max(gaps, default=0.0):
            longest *= 2
        return Run(Kind.BOUND, self.cell, seed=seed, copies=copies, able=self.able, longest_gap_seconds=longest)

    def bounded(self, seed: int, copies: Copies = Copies.JITTERED) -> dict[str, Result]:
        """Of this draw, all that is known of what may not pass the bound, by what it is called: the knowing too, and
        none whose machines are its own."""
        plain = [OURS, *SHIPPED, *FULL.policies, *self._every_split(HELD), *self._every_split(STATIC)]
        names = [*plain, *(with_admission(name) for name in plain if not contenders.is_split(name))]
        runs = {name: self.policy(name, seed, copies) for name in names}
        runs |= {f"{name}, knowing": self.policy(name, seed, copies, Twist(knows=True)) for name in plain}
        runs |= {f"clairvoyant, {search}": self.clairvoyant(seed, search, copies) for search in Search}
        found = {name: self.known(run) for name, run in runs.items()}
        return {name: result for name, result in found.items() if result is not None and not result.own_machines}

    def clairvoyant(self, seed: int, search: Search, copies: Copies = Copies.JITTERED) -> Run:
        return Run(Kind.CLAIRVOYANT, self.cell, search.value, seed, copies, able=self.able)

    def splits_known(self, seed: int = 1, part: bool = False) -> list[str]:
        """Of both sweeps, best first; `part`: by the first part alone."""
        names = [name for base in (HELD, STATIC) for name in self._every_split(base)]
        found = [(self.known.value(self.part(name)) if part else self.value(name, seed), name) for name in names]
        known = [(value, name) for value, name in found if value is not None]
        return [name for _, name in sorted(known, key=lambda row: -row[0])]

    def _every_split(self, base: str) -> list[str]:
        prompts = range(self.cell.machines + 1)
        mixed = [f"{base}:0/0/{self.cell.machines}"]
        return [name for m in (0, 1) for name in contenders.splits(self.cell, prompts, m, base)] + mixed

    def sweeps(self, effort: Effort) -> Stages:
        """In hindsight, on the first draw: with Poolwright's router and engines, and then with those of baselines the
        splits that were best, or all."""
        yield from self._sweep(HELD, effort.in_part)
        if effort.everywhere:
            yield from self._sweep(STATIC, effort.in_part)
            return
        if effort.in_part:
            best = self.splits_known(part=True)[:SPLITS_DRAWN]
            yield [self.policy(name, 1) for name in best]
        best = [name for name in self.splits_known() if contenders.parts(name)[0] == HELD]
        again = [name.replace(HELD, STATIC, 1) for name in best[:SPLITS_DRAWN_AGAIN]]
        yield [self.policy(name, 1) for name in again]

    def _sweep(self, base: str, part: bool) -> Stages:
        every = self._every_split(base)

        def runs(names: Iterable[str]) -> list[Run]:
            return [self.part(name) if part else self.policy(name, 1) for name in names]

        if self.cell.machines <= ALL_SPLITS_UP_TO:
            yield runs(every)
            return
        step = -(-self.cell.machines // FIRST_GRID)
        prompts = range(step // 2 or 1, self.cell.machines, step)
        yield runs((*contenders.splits(self.cell, prompts, 0, base), every[-1]))
        last = ""
        while True:
            step = max(1, step // 2)
            pools = [name for name in self.splits_known(part=part) if name in every[:-1]]
            if not pools or pools[0] == last:
                return
            last = pools[0] if step == 1 else ""
            best = contenders.split_of(pools[0], self.cell)[0]
            near = (best - step, best, best + step)
            names = [*contenders.splits(self.cell, near, 0, base), *contenders.splits(self.cell, near, 1, base)]
            yield runs(name for name in names if name in every)

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
    """Nothing may be asked of a stage's results before it was yielded. What comes first is known where time ends early:
    one draw of everything, then the others, then what it is held against."""
    yield [capacity_of(cell)]
    asked = questions(cell, known)
    if asked is None:
        return
    seeds = range(1, effort.seeds + 1)
    policies = [*SHIPPED, *effort.policies]
    yield [asked.policy(OURS, 1)]
    if effort.in_part:
        yield [asked.part(name) for name in (OURS, *effort.policies)]
        policies = [*SHIPPED, *asked.near(effort.policies)]
    yield [asked.policy(name, 1) for name in policies]
    yield from asked.sweeps(effort)
    again = [OURS, *asked.splits_known()[:SPLITS_DRAWN_AGAIN]]
    again += policies if effort.everywhere else asked.rivals(policies)
    yield [asked.policy(name, seed) for seed in seeds for name in again]
    if cell.admission or effort.everywhere:
        behind = policies if effort.everywhere else asked.rivals(policies)
        yield [asked.policy(with_admission(name), 1) for name in (OURS, *behind)]
        yield [asked.policy(with_admission(name), seed) for seed in seeds for name in (OURS, *behind[:1])]
    knowing = [OURS, *asked.rivals(policies)[: effort.knowing_rivals], *asked.splits_known()[:1]]
    yield [asked.policy(name, 1, twist=Twist(knows=True)) for name in knowing]
    if cell.machines <= effort.searched_machines:
        yield [asked.clairvoyant(1, effort.search)]
    if not cell.nine:
        yield [asked.bound(seed) for seed in seeds]
    copies = Copies.SHUFFLED
    row = [OURS, *asked.splits_known()[:1], *asked.rivals(name for name in policies if name not in SHIPPED)]
    row = row[: 2 + SHUFFLED_RIVALS]
    shuffled = range(1, effort.shuffled_seeds + 1)
    yield [asked.policy(name, seed, copies) for seed in shuffled for name in row]
    if effort.everywhere and not cell.nine:
        yield [asked.bound(seed, copies) for seed in shuffled]


def claims_clairvoyant(cell: Cell) -> bool:
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


def in_part(cell: Cell) -> Cell:
    return shortened(cell, cell.seconds * (PART_OF_CHANGES if cell.changes else PART))


MakeStages = Callable[[Cell], Stages]


def missing(stages: Stages, known: Known) -> tuple[int, list[Run]] | None:
    """The first stage that is not known in whole, and what of it is not."""
    for number, stage in enumerate(stages):
        lacking = [run for run in stage if known(run) is None]
        if lacking:
            return number, lacking
    return None

"""Three accounts that settle between one pool and two, each with its numbers, and the answer they give together.

Chunked prefill: one pool whose steps would be too long with whole prompts, and are not with chunks (Sarathi-Serve,
OSDI 2024). Split: TTFT and TPOT each with machines of its own, where links carry the KV and traffic fills both pools
(DistServe, OSDI 2024, section 7). Bandwidth: KV that would stand in its link. Before them: work without a deadline
wants throughput alone, and few machines cannot be two pools. Judges numbers that were measured; runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# Of the mean rate: KV comes in bursts as prompts do, and a link that is half full already makes a random arrival wait
# half a transfer (M/D/1: share / (2 - 2 · share) transfers).
MOST_LINK_SHARE = 0.5
# Of a machine: below it, a pool of its own stands idle most of the time.
LEAST_POOL_LOAD = 0.5


class Answer(StrEnum):
    THROUGHPUT_FIRST = "throughput first, in one pool"
    ONE_POOL = "one pool"
    CHUNKED_PREFILL = "one pool with chunked prefill"
    SPLIT = "split"
    DO_NOT_SPLIT = "do not split: one pool with chunked prefill"


@dataclass(frozen=True, slots=True)
class Served:
    """What a simulated form of the cluster attained. `cost` in what the plan saves: machines, dollars or watts."""

    name: str
    cost: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Case:
    """`prompt_load` and `token_load`: machines that each phase keeps busy. `whole_step_seconds`: a step with a long
    prompt taken whole beside decodes; `chunked_step_seconds`: the same with the chunk that the budget allows.
    `kv_wait_seconds`: what the second token waits for KV that the prompt's computation does not hide. `one_pool` and
    `split` None: not run."""

    tbt_seconds: float
    target: float
    machines: int
    whole_step_seconds: float
    chunked_step_seconds: float
    prompt_load: float
    token_load: float
    link_share: float
    kv_wait_seconds: float
    one_pool: Served | None
    split: Served | None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    holds: bool
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Answer
    why: str
    accounts: Sequence[Account]


def verdict(case: Case) -> Verdict:
    chunked, bandwidth, split = _chunked(case), _bandwidth(case), _split(case)
    few = _few(case)
    accounts = (chunked, split, bandwidth, few, _offline(case))
    one, two = case.one_pool, case.split
    if case.offline:
        return Verdict(Answer.THROUGHPUT_FIRST, "no request has a deadline", accounts)
    if case.machines < 2:
        return Verdict(Answer.ONE_POOL, few.why, accounts)
    if bandwidth.holds:
        return Verdict(Answer.DO_NOT_SPLIT, bandwidth.why, accounts)
    if two is not None and _better(two, one, case.target):
        beside = f"; although {few.why}" if few.holds else ""
        return Verdict(Answer.SPLIT, f"{split.why}{beside}", accounts)
    if few.holds:
        return Verdict(Answer.ONE_POOL, few.why, accounts)
    answer = Answer.CHUNKED_PREFILL if chunked.holds else Answer.ONE_POOL
    return Verdict(answer, _compared(case), accounts)


def _better(two: Served, one: Served | None, target: float) -> bool:
    """Meets the target where one pool does not; costs less where both do; attains more where neither does."""
    if one is None:
        return True
    meets = (two.attainment >= target, one.attainment >= target)
    if all(meets):
        return two.cost < one.cost
    if any(meets):
        return meets[0]
    return (two.attainment, -two.cost) > (one.attainment, -one.cost)


def _chunked(case: Case) -> Account:
    whole, chunk, tbt = case.whole_step_seconds, case.chunked_step_seconds, case.tbt_seconds
    figures = f"a long prompt whole makes a step of {_ms(whole)}, a chunk {_ms(chunk)}, against {_ms(tbt)} of TBT"
    return Account("TBT binds one pool: chunked prefill", whole > tbt >= chunk, figures)


def _split(case: Case) -> Account:
    fills = min(case.prompt_load, case.token_load) >= LEAST_POOL_LOAD
    better = case.split is not None and _better(case.split, case.one_pool, case.target)
    return Account(
        "TTFT and TPOT apart, with bandwidth and traffic: split",
        better and fills and not _bandwidth(case).holds,
        f"{_compared(case)}; {_loads(case)}",
    )


def _bandwidth(case: Case) -> Account:
    full, late = case.link_share > MOST_LINK_SHARE, case.kv_wait_seconds > case.tbt_seconds
    why = (
        f"KV takes {case.link_share:.1%} of its link, at most {MOST_LINK_SHARE:.0%} is sound; "
        f"the second token waits {_ms(case.kv_wait_seconds)} for it, against {_ms(case.tbt_seconds)} of TBT"
    )
    return Account("bandwidth is the limit: do not split", full or late, why)


def _few(case: Case) -> Account:
    if case.machines < 2:
        return Account("few machines: one pool", True, "a split needs a machine for each phase, and there is one")
    holds = min(case.prompt_load, case.token_load) < LEAST_POOL_LOAD
    return Account("few machines: one pool", holds, _loads(case))


def _offline(case: Case) -> Account:
    why = "no request has a deadline" if case.offline else "requests have deadlines"
    return Account("offline: throughput first", case.offline, why)


def _loads(case: Case) -> str:
    return (
        f"prompts keep {case.prompt_load:.2f} machines busy and answers {case.token_load:.2f}, a pool of its own is "
        f"worth it from {LEAST_POOL_LOAD:g}"
    )


def _compared(case: Case) -> str:
    def said(served: Served | None, what: str) -> str:
        if served is None:
            return f"{what} was not run"
        met = "meets" if served.attainment >= case.target else "misses"
        return f"{served.name} {met} the target with {served.attainment:.1%}"

    return f"{said(case.one_pool, 'one pool')}, {said(case.split, 'a split')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"

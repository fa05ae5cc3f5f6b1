"""How hard the work that is offered would press a split of the machines, and which split it would press least.

Owns the arithmetic from offered work and prices to pressure; which machine moves, and when, is not known here.

Pressure of a phase, 0 for none: .55 at a utilisation of .8 (the upper edge of llm-d's band, at Narwhal's planning
utilisation), 1 where its objective is just met, above 2 where work arrives faster than it can be done. Only what a
machine more could take away counts: of TTFT the wait (its percentile in M/G/c), of TBT the streams beyond what a step
within the target holds.

Where every gap counts, the second token of an answer whose prompt was computed elsewhere comes in time only if token
machines' steps are a third of the target. Where none is that short, such an answer attains its target only if it is so
long that one late gap is within the share that may be. Then token machines, which routers lend, are counted as mixed
ones, and whom a split serves late as what is offered beyond what it can do.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from poolwright.core.forecast import Offered
from poolwright.core.pricing import STEP_MARGIN, MachinePrices, Prices, split_step_seconds
from poolwright.core.routes import every_gap_counts
from poolwright.core.spec import Metric, PolicySpec
from poolwright_protocol.roles import Role

RAISE = 0.55
PLANNED_UTILISATION = 0.8
DEADBAND = 0.05  # of pressure: a shift must take away at least this much
OVERLOADED = 2.0  # pressure where a phase is offered exactly what it can do
_CLASS_AND_ROLE = tuple[str, Role]
_BISECTIONS = 5  # of a mixed machine's time: to a thirtieth of it
_LENT_WORTH = 0.95  # of a token machine that works as a mixed one: it is asked last
_FULL = 0.9  # of a machine's time, where more of whole requests is better than pairs
# Streams come and go: their number strays by its square root, this many of which are to fit under the target.
_DEVIATIONS = 1.3

ByClass = Mapping[_CLASS_AND_ROLE, int]  # machines of a class in a role
Step = tuple[str, Role, Role]  # a machine of this class, from, to


@dataclass(frozen=True, slots=True)
class Worth:
    """Shares of all offered prompt work, and of all offered decode work, that one machine does when always busy."""

    prompt: float
    token: float
    mixed_prompt: float
    mixed_token: float


@dataclass(frozen=True, slots=True)
class Pressure:
    """`mixed_share`: of the mixed machines' time, what goes to prompts. `served`: of all requests, those in time."""

    prompt: float
    token: float
    mixed_share: float = 0.5
    served: float = 1.0

    @property
    def most(self) -> float:
        return max(self.prompt, self.token)

    def __str__(self) -> str:
        in_time = "" if self.served >= 1 else f", {self.served:.0%} of the requests in time"
        return f"prompts {self.prompt:.2f}, tokens {self.token:.2f}{in_time}"

    def is_better_than(self, other: "Pressure") -> bool:
        mine, theirs = (self.most, self.prompt + self.token), (other.most, other.prompt + other.token)
        return mine[0] < theirs[0] - 1e-9 or (mine[0] <= theirs[0] + 1e-9 and mine[1] < theirs[1] - 1e-9)


class Demand:
    """The offered work as every class of machine sees it."""

    def __init__(self, spec: PolicySpec, prices: Prices, offered: Offered) -> None:
        self._spec = spec
        self.offered = offered
        ttft, tbt = spec.objective(Metric.TTFT), spec.objective(Metric.TBT)
        self._tbt_seconds = tbt.target_seconds if tbt else math.inf
        if not any(_streams(prices[c.name], offered, self._tbt_seconds) for c in spec.classes):
            self._tbt_seconds = math.inf  # no split meets it, so machines are counted as if it were not there
        # The second token of a prompt computed elsewhere comes late, which may count or not.
        # Then a mixed machine, whose steps hold chunks, decodes only what it computed itself.
        self._whole_on_mixed = tbt is not None and every_gap_counts(tbt.percentile, offered.output_tokens)
        self._token_step_seconds = self._tbt_seconds
        self._late_pairs = False
        if self._whole_on_mixed:
            short = split_step_seconds(self._tbt_seconds)
            self._late_pairs = not any(_streams(prices[c.name], offered, short) for c in spec.classes)
            if not self._late_pairs:
                self._token_step_seconds = short
        self._pairs_in_time = _share_with_a_gap_to_spare(tbt.percentile if tbt else 0.0, offered.output_tokens)
        limits = self._tbt_seconds, self._token_step_seconds
        self._worths = {c.name: _worth(prices[c.name], offered, *limits) for c in spec.classes}
        self._own_seconds = _mean([prices[c.name].prefill_seconds(offered.prompt_tokens) for c in spec.classes])
        self._streams_each = _mean([_streams(prices[c.name], offered, self._token_step_seconds) for c in spec.classes])
        self._missed_share = 1 - (ttft.percentile / 100 if ttft else 0.9)
        self._missed_share = max(self._missed_share, 0.001)
        self._wait_budget_seconds = (ttft.target_seconds if ttft else math.inf) - self._own_seconds
        # Kingman's factor, with lengths as an exponential's: one half of the arrivals' dispersion plus one.
        self._variability = (offered.dispersion + 1) / 2

    def worth(self, machine_class: str) -> Worth:
        return self._worths[machine_class]

    def _placed(self, counts: ByClass) -> Iterator[tuple[Worth, Role, int]]:
        """The machines there are, of classes whose worth is known."""
        for (name, role), count in counts.items():
            worth = self._worths.get(name)
            if worth is not None and count > 0:
                yield worth, role, count

    def pressure(self, counts: ByClass) -> Pressure:
        if self._late_pairs:
            return self._with_late_pairs(counts)
        prompt = token = mixed_prompt = mixed_token = 0.0
        prompts = tokens = mixed = 0
        for worth, role, count in self._placed(counts):
            if role is Role.PROMPT:
                prompt += count * worth.prompt
                prompts += count
            elif role is Role.TOKEN:
                token += count * worth.token
                tokens += count
            else:
                mixed_prompt += count * worth.mixed_prompt
                mixed_token += count * worth.mixed_token
                mixed += count
        if self._whole_on_mixed:
            # Of mixed machines' time, prompts take what they take; `share` is of all requests.
            both = _inverse(mixed_prompt) + _inverse(mixed_token)
            of_time = _inverse(mixed_prompt) / both if 0 < both < math.inf else 0.5

        def by_time(share: float) -> Pressure:
            """`share` of the mixed machines' time goes to prompts, of whichever request."""
            return Pressure(
                self._prompt_pressure(1.0, prompt + share * mixed_prompt, prompts + share * mixed),
                self._token_pressure(1.0, token + (1 - share) * mixed_token, tokens + (1 - share) * mixed),
                share,
            )

        def by_request(share: float) -> Pressure:
            """`share` of the requests is mixed machines' whole, and the rest a prompt and a token machine's."""
            on_mixed = self._prompt_pressure(share, _inverse(both), mixed) if mixed else (math.inf if share else 0.0)
            on_prompt = self._prompt_pressure(1 - share, prompt, prompts)
            return Pressure(
                max(on_mixed, on_prompt) if share < 1 else on_mixed,
                self._token_pressure(1 - share, token, tokens),
                of_time,
            )

        if not mixed:
            return by_time(0.5)
        if not self._whole_on_mixed:
            return _balanced(by_time, lambda p: p.prompt > p.token)
        if not prompts or not tokens:
            return by_request(1.0)

        # More requests on mixed machines ease the pairs and press the mixed: least where both are the same.
        low, high = 0.0, 1.0
        best = by_request(0.5)
        for _ in range(_BISECTIONS):
            share = (low + high) / 2
            on_mixed = self._prompt_pressure(share, _inverse(both), mixed)
            pressed = by_request(share)
            if pressed.is_better_than(best):
                best = pressed
            if on_mixed < max(self._prompt_pressure(1 - share, prompt, prompts), pressed.token):
                low = share
            else:
                high = share
        return best

    def _with_late_pairs(self, counts: ByClass) -> Pressure:
        """As many requests as fit whole on the machines that decode, and of the rest the prompts on prompt machines."""
        prompt = host_prompt = host_token = answers = 0.0
        prompts = hosts = takers = 0
        for worth, role, count in self._placed(counts):
            if role is Role.PROMPT:
                prompt += count * worth.prompt
                prompts += count
                continue
            able = count * (_LENT_WORTH if role is Role.TOKEN else 1.0)
            host_prompt += able * worth.mixed_prompt
            host_token += able * worth.mixed_token
            answers += count * worth.token
            hosts += count
            takers += 0 if role is Role.TOKEN else count
        if not hosts or not (prompts or takers):
            return Pressure(math.inf, math.inf, served=0.0)
        of_whole, of_answer = _inverse(host_prompt) + _inverse(host_token), _inverse(answers)
        whole = 1.0
        if prompts and of_whole > _FULL:
            whole = max(0.0, (_FULL - of_answer) / (of_whole - of_answer)) if of_whole > of_answer else 0.0
        at_hosts = _part(whole, of_whole) + _part(1 - whole, of_answer)
        at_prompts = _part(1 - whole, _inverse(prompt))
        served = whole + (1 - whole) * self._pairs_in_time / max(1.0, at_prompts)
        for_prompts = _part(whole, _inverse(host_prompt))
        served /= max(1.0, at_hosts)
        return Pressure(
            max(
                self._prompt_pressure(at_hosts, 1.0, hosts),
                self._prompt_pressure(at_prompts, 1.0, prompts),
                0.0 if served >= 1 else OVERLOADED * _inverse(served),
            ),
            self._token_pressure(1.0, answers, hosts),
            for_prompts / at_hosts if 0 < at_hosts < math.inf else 0.5,
            served,
        )

    def machines_wanted(self, counts: ByClass) -> float:
        """How many times these machines the offered work would keep busy at the planned utilisation, less one, in
        machines: what is missing to the budget (or, below zero, to spare)."""
        total = sum(counts.values())
        need = 0.0
        best = {phase: max((getattr(w, phase) for w in self._worths.values()), default=0.0) for phase in _PHASES}
        for share in best.values():
            need += math.inf if share <= 0 else 1 / share / PLANNED_UTILISATION
        return need - total

    def best(self, counts: ByClass, most_steps: int) -> tuple[list[Step], Pressure]:
        """At most so many steps from these counts towards the split that is pressed least, within minimums, maximums
        and what classes may be: as many as leave it pressed less than it is."""
        now = self.pressure(counts)
        steps = _way(counts, self._target(counts))
        after = dict(counts)
        for step in steps[:most_steps]:
            _apply(after, step, 1)
        for last in range(min(len(steps), most_steps), 0, -1):
            pressed = self.pressure(after)
            if pressed.is_better_than(now):
                return steps[:last], pressed
            _apply(after, steps[last - 1], -1)
        return [], now

    def is_worse_after(self, counts: ByClass, step: Step) -> bool:
        """By more than forecasts are believed; at all, where a hand-over is late whatever is forecast."""
        after = dict(counts)
        _apply(after, step, 1)
        believed = 1e-9 if self._late_pairs else DEADBAND
        return self.pressure(after).most > self.pressure(counts).most + believed

    def _target(self, counts: ByClass) -> ByClass:
        if len(self._spec.classes) == 1 and self._spec.classes[0].roles == frozenset(Role):
            return self._of_one_class(counts, self._spec.classes[0].name)
        return self._downhill(dict(counts))[0]

    def _of_one_class(self, counts: ByClass, name: str) -> ByClass:
        """For some numbers of mixed machines, the rest is cut where both phases are pressed alike."""
        best, pressed = counts, self.pressure(counts)
        total = _of_class(counts, name)
        least = {role: bounds.minimum for role, bounds in self._spec.pools.items()}
        most = {role: total if b.maximum is None else b.maximum for role, b in self._spec.pools.items()}
        if self._late_pairs:
            return self._of_one_class_with_late_pairs(counts, name)
        for mixed in sorted({0, 1, 2, counts.get((name, Role.MIXED), 0), total // 2, total}):
            rest = total - mixed
            low, high = (
                max(least[Role.PROMPT], rest - most[Role.TOKEN]),
                min(most[Role.PROMPT], rest - least[Role.TOKEN]),
            )
            if not (least[Role.MIXED] <= mixed <= most[Role.MIXED] and low <= high):
                continue
            first = low
            while low < high:
                middle = (low + high) // 2
                tried = self.pressure(_split(name, middle, rest - middle, mixed))
                low, high = (middle + 1, high) if tried.prompt > tried.token else (low, middle)
            for prompt in range(max(first, low - 1), low + 1):
                split = _split(name, prompt, rest - prompt, mixed)
                candidate = self.pressure(split)
                more_mixed = mixed > best.get((name, Role.MIXED), 0)
                if candidate.is_better_than(pressed) and candidate.most < pressed.most - _WORTH_MIXING * more_mixed:
                    best, pressed = split, candidate
        if self._whole_on_mixed:
            # A hand-over is late by more than is predicted here sooner than a step of a mixed machine is.
            split = _split(name, 0, 0, total)
            if all(self._within(split, role) for role in Role) and self.pressure(split).most <= pressed.most + DEADBAND:
                return split
        return best

    def _of_one_class_with_late_pairs(self, counts: ByClass, name: str) -> ByClass:
        """Whoever is no prompt machine is as good as mixed, so only their number is to be found: coarsely first."""
        total = _of_class(counts, name)
        bounds = self._spec.pools

        def split(prompt: int) -> dict[_CLASS_AND_ROLE, int] | None:
            """With as many mixed machines as may be."""
            rest = total - prompt
            most = rest if bounds[Role.MIXED].maximum is None else bounds[Role.MIXED].maximum
            mixed = min(rest - bounds[Role.TOKEN].minimum, most if most is not None else rest)
            made = _split(name, prompt, rest - mixed, mixed)
            return made if mixed >= 0 and all(self._within(made, role) for role in Role) else None

        best, pressed = counts, self.pressure(counts)
        stride = max(1, total // 8)
        tried: set[int] = set()
        near = set(range(0, total + 1, stride))
        while near:
            found = None
            for prompt in sorted(near - tried):
                candidate = split(prompt)
                if candidate is not None and self.pressure(candidate).is_better_than(pressed):
                    best, pressed, found = candidate, self.pressure(candidate), prompt
            tried |= near
            if stride == 1 and found is None:
                break
            stride = max(1, stride // 2)
            centre = best.get((name, Role.PROMPT), 0)
            near = {p for p in (centre - stride, centre + stride) if 0 <= p <= total} - tried
        return best

    def _downhill(self, counts: dict[_CLASS_AND_ROLE, int]) -> tuple[dict[_CLASS_AND_ROLE, int], Pressure]:
        """Steps that only help together (classes that trade places, a mixed pair that becomes one machine for each
        phase) are tried together, and large strides first where there are many machines."""
        pressed = self.pressure(counts)
        stride = 1 << max(0, sum(counts.values()).bit_length() - 5)
        while stride:
            found: tuple[list[Step], Pressure] | None = None
            single = [s for s in self._steps(counts) if counts[s[0], s[1]] >= stride]
            together = [[a, b] for a in single for b in single if _trade(a, b) or _new_pair(a, b)]
            for taken in [*([s] for s in single), *together]:
                for step in taken:
                    _apply(counts, step, stride)
                if all(self._within(counts, role) for s in taken for role in s[1:]):
                    candidate = self.pressure(counts)
                    if candidate.is_better_than(found[1] if found else pressed):
                        found = (taken, candidate)
                for step in taken:
                    _apply(counts, step, -stride)
            if found is None:
                stride //= 2
                continue
            for step in found[0]:
                _apply(counts, step, stride)
            pressed = found[1]
        return counts, pressed

    def bound(self, counts: ByClass, prices: MachinePrices, role: Role) -> int:
        """`maxPrefillTokensPerStep`: the largest chunk that keeps the step within the TBT target beside the streams
        that a mixed machine has at these counts, or that fill a token machine. A mixed machine's is never so small that
        its share of the prompts would pile up: tokens late by a little are worth more than prompts that never begin."""
        if math.isinf(self._tbt_seconds):
            return prices.step_tokens
        if role is Role.TOKEN and not self._late_pairs:
            streams = _streams(prices, self.offered, self._token_step_seconds)
            return prices.chunk_within(self._tbt_seconds, streams, streams * self.offered.context_tokens)
        share = self.pressure(counts).mixed_share
        streams = (1 - share) * _streams(prices, self.offered, self._tbt_seconds)
        context = streams * self.offered.context_tokens
        least = prices.chunk_at_rate(self._prompt_rate_of_mixed(counts, share), streams, context)
        if self._late_pairs:  # all do both, so streams come and go: what a step holds beside none
            return max(least, prices.chunk_within(STEP_MARGIN * self._tbt_seconds, 0, 0))
        return max(least, prices.chunk_within(self._tbt_seconds, streams, context))

    def _prompt_rate_of_mixed(self, counts: ByClass, share: float) -> float:
        """Prompt tokens a second that come to one mixed machine, with room for what is not planned."""
        pure = mixed = 0.0
        machines = 0
        for (name, role), count in counts.items():
            worth = self._worths.get(name)
            if worth is not None and role is Role.PROMPT:
                pure += count * worth.prompt
            elif worth is not None and role is Role.MIXED:
                mixed += count * share * worth.mixed_prompt
                machines += count
        if not machines or mixed <= 0:
            return 0.0
        return self.offered.prompt_tokens_per_second * mixed / (pure + mixed) / machines / PLANNED_UTILISATION

    def _prompt_pressure(self, share: float, coverage: float, servers: float) -> float:
        """`share` of all requests, on machines that could do `coverage` of them."""
        if share <= 0:
            return 0.0
        if coverage <= 0:
            return math.inf
        busy = share / coverage
        if busy >= 1:
            return OVERLOADED * busy
        pressure = RAISE * busy / PLANNED_UTILISATION
        servers = max(1.0, servers)
        waits = busy ** (math.sqrt(2 * (servers + 1)) - 1)  # Sakasegawa: the share that waits at all
        if waits > self._missed_share and self._wait_budget_seconds > 0:
            mean = self._own_seconds * self._variability / (servers * (1 - busy))
            wait = mean * math.log(waits / self._missed_share)
            pressure = max(pressure, min(OVERLOADED, wait / self._wait_budget_seconds))
        return pressure

    def _token_pressure(self, share: float, coverage: float, servers: float) -> float:
        if share <= 0 or self.offered.decodes_per_second <= 0:
            return 0.0
        if coverage <= 0:
            return math.inf
        busy = share / coverage
        if busy >= 1:
            return OVERLOADED * busy
        streams = max(1.0, self._streams_each * max(1.0, servers))
        tail = busy * (1 + _DEVIATIONS / math.sqrt(streams))
        return max(RAISE * busy / PLANNED_UTILISATION, min(OVERLOADED, 1 - 4 * (1 - tail)))

    def _steps(self, counts: ByClass) -> Iterator[Step]:
        for c in self._spec.classes:
            for from_role in Role:
                if counts.get((c.name, from_role), 0) > 0:
                    for to_role in Role:
                        if to_role is not from_role and to_role in c.roles:
                            yield c.name, from_role, to_role

    def _within(self, counts: ByClass, role: Role) -> bool:
        bounds = self._spec.pools[role]
        total = sum(n for (_, r), n in counts.items() if r is role)
        return bounds.minimum <= total and (bounds.maximum is None or total <= bounds.maximum)


_PHASES = ("prompt", "token")
_WORTH_MIXING = 0.05  # of pressure: for less, a phase keeps its machines to itself
_PLENTY = 1e9  # finite, so that no share of it is not a number


def _trade(a: Step, b: Step) -> bool:
    """Two classes that change places, counted once."""
    return a[0] < b[0] and (a[1], a[2]) == (b[2], b[1])


def _new_pair(a: Step, b: Step) -> bool:
    """Two mixed machines that become one of each phase, counted once."""
    return (a[1:], b[1:]) == ((Role.MIXED, Role.PROMPT), (Role.MIXED, Role.TOKEN))


def _split(name: str, prompt: int, token: int, mixed: int) -> dict[_CLASS_AND_ROLE, int]:
    return {(name, Role.PROMPT): prompt, (name, Role.TOKEN): token, (name, Role.MIXED): mixed}


def _of_class(counts: ByClass, name: str) -> int:
    return sum(n for (of, _), n in counts.items() if of == name)


def _way(start: ByClass, end: ByClass) -> list[Step]:
    """Opposite differences of a class paired: who leaves a pool that is too large goes to one that is too small."""
    steps: list[Step] = []
    for name in dict.fromkeys(of for of, _ in (*start, *end)):
        change = {role: end.get((name, role), 0) - start.get((name, role), 0) for role in Role}
        leave = [role for role in Role for _ in range(-change[role])]
        join = [role for role in Role for _ in range(change[role])]
        steps += [(name, a, b) for a, b in zip(leave, join, strict=True)]
    return steps


def _apply(counts: dict[_CLASS_AND_ROLE, int], step: Step, times: int) -> None:
    name, from_role, to_role = step
    counts[name, from_role] -= times
    counts[name, to_role] = counts.get((name, to_role), 0) + times


def _share_with_a_gap_to_spare(percentile: float, output_tokens: float) -> float:
    """Of answers, with lengths as an exponential's: those of so many gaps that one may be over the target."""
    gaps = max(1e-9, output_tokens - 1)
    missed = 1 - percentile / 100
    return math.exp(-1 / (missed * gaps)) if missed > 1e-9 else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _streams(prices: MachinePrices, offered: Offered, tbt_seconds: float) -> float:
    return prices.streams_within(tbt_seconds, offered.context_tokens)


def _worth(prices: MachinePrices, offered: Offered, tbt_seconds: float, token_step_seconds: float) -> Worth:
    prompts, decodes = offered.prompt_tokens_per_second, offered.decodes_per_second
    context, cost = offered.context_tokens, prices.profile.mixed
    prompt_speed = _speed(1, prices.prompt_token_seconds(offered.prompt_tokens))
    streams = _streams(prices, offered, token_step_seconds)
    token_speed = _speed(streams, prices.decode_seconds(streams, streams * context))
    # On a mixed machine every step stays within the target, whatever it holds.
    chunk = prices.step_tokens if math.isinf(tbt_seconds) else prices.chunk_within(tbt_seconds, 0, 0)
    step = cost.seconds(chunk, offered.prompt_tokens) + chunk * offered.prompt_tokens / 2 * prices.pair_seconds
    fits = step <= tbt_seconds
    beside = cost.token_seconds + cost.kv_token_seconds * context
    most = _streams(prices, offered, tbt_seconds)
    held = (min(tbt_seconds, step) / STEP_MARGIN - cost.fixed_seconds) / beside if beside > 0 else most
    held = min(most, max(0.0, held))
    mixed_speed = _speed(held, cost.seconds(held, held * context))
    return Worth(
        prompt=_share(prompt_speed, prompts),
        token=_share(token_speed, decodes),
        mixed_prompt=_share(min(prompt_speed, _speed(chunk, step)) if fits else 0.0, prompts),
        mixed_token=_share(mixed_speed, decodes),
    )


def _part(share: float, of: float) -> float:
    """None of what has no end is nothing."""
    return share * of if share > 0 else 0.0


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else math.inf


def _balanced(at: Callable[[float], Pressure], is_short: Callable[[Pressure], bool]) -> Pressure:
    """Where the two sides are pressed alike, or nearest to it."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = at((low + high) / 2)
        if is_short(middle):
            low = middle.mixed_share
        else:
            high = middle.mixed_share
    return at((low + high) / 2)


def _speed(work: float, seconds: float) -> float:
    return work / max(seconds, 1e-9) if work > 0 else 0.0


def _share(speed: float, offered: float) -> float:
    return min(_PLENTY, speed / offered) if offered > 1e-9 else _PLENTY if speed > 0 else 0.0

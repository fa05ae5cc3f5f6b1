"""How many machines, of which kind, split how: forms of a cluster are simulated, and the cheapest that does is found.

The grid is Splitwise's provisioning (ISCA 2024, section 4.4): machines for prompts times machines for answers, each of
any kind, on a short trace; beside it all in one pool. Each form runs under Poolwright's own router and engines with its
roles held still, so that a form is judged by what it is, and the chosen one once more with moves. Kinds are taken as
their tables are: parallelism is part of a kind's name, and each phase may have its own (DistServe, OSDI 2024,
algorithm 1). Draws nothing, prints nothing.
"""

import csv
import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from poolwright.sim import traces
from poolwright.sim.accounts import Answer, Case, Served, Verdict, verdict
from poolwright.sim.baselines.profile import MachineProfile
from poolwright.sim.baselines.rules import REFERENCE_DECODES, tuned_budget
from poolwright.sim.kv_ledger import KVLedger, network_link
from poolwright.sim.measures import Measures, measure
from poolwright.sim.network import Network
from poolwright.sim.ours import Options, ours
from poolwright.sim.outcome import RunOutcome
from poolwright.sim.plan_memory import PlanMemory
from poolwright.sim.policy import Policy, Setting, Slo
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_protocol.roles import Role

AROUND = 2  # splits tried on each side of the one that the loads of the phases suggest
# A search begins at this share of the machines that the work alone would fill: batches may be better than thought.
BEGIN_SHARE = 0.7
OFFLINE_TBT_SECONDS = 10.0
MOST_COST_RATIO = 1.5  # of a split to one pool that meets the target
_CSV_COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens")


class Goal(StrEnum):
    MACHINES = "machines"
    COST = "cost"
    POWER = "power"


@dataclass(frozen=True, slots=True)
class Question:
    """`machines` None: the least that meet `target`, up to `most_machines`. `around` None: every split."""

    trace: Trace
    slo: Slo
    kinds: Sequence[MachineModel]
    gbps: float
    machines: int | None = None
    most_machines: int = 16
    target: float = 0.9
    goal: Goal = Goal.MACHINES
    offline: bool = False
    around: int | None = AROUND

    def __post_init__(self) -> None:
        most = self.machines if self.machines is not None else self.most_machines
        if most < 1:
            raise ValueError("a plan needs at least one machine")
        if not self.kinds:
            raise ValueError("a plan needs at least one kind of machine")
        if len({kind.kv_bytes_per_token for kind in self.kinds}) > 1:
            raise ValueError("kinds of machines that hold different models cannot share requests")
        if not len(self.trace):
            raise ValueError(f"{self.trace.name} has no requests")
        numbers = (self.slo.ttft_seconds, self.slo.tbt_seconds, self.gbps)
        if not all(0 < number < math.inf for number in numbers) or not 0 < self.target <= 1:
            raise ValueError("targets and bandwidth are above 0, and the share that meets them at most 1")
        for kind in self.kinds:
            if self.goal is Goal.COST and kind.dollars_per_hour is None:
                raise ValueError(f"the price of {kind.name} is not in its table; choose another goal")
            if self.goal is Goal.POWER and kind.watts is None:
                raise ValueError(f"the power of {kind.name} is not in its table; choose another goal")

    @property
    def used_slo(self) -> Slo:
        """Without deadlines, all is to be begun within the length of the trace."""
        return Slo(self.trace.horizon_seconds, OFFLINE_TBT_SECONDS) if self.offline else self.slo


@dataclass(frozen=True, slots=True)
class Form:
    """`prompt` machines of one kind and `token` of another; or `mixed` ones of the first kind."""

    prompt_kind: MachineModel
    token_kind: MachineModel
    prompt: int
    token: int
    mixed: int = 0

    @property
    def models(self) -> list[MachineModel]:
        return [self.prompt_kind] * (self.prompt + self.mixed) + [self.token_kind] * self.token

    @property
    def roles(self) -> list[Role]:
        return [Role.PROMPT] * self.prompt + [Role.MIXED] * self.mixed + [Role.TOKEN] * self.token

    @property
    def machines(self) -> int:
        return self.prompt + self.mixed + self.token

    @property
    def split(self) -> bool:
        return self.mixed == 0

    @property
    def name(self) -> str:
        if not self.split:
            return f"{self.mixed} mixed {self.prompt_kind.name}"
        if self.prompt_kind == self.token_kind:
            return f"{self.prompt} prompt + {self.token} token {self.prompt_kind.name}"
        return f"{self.prompt} prompt {self.prompt_kind.name} + {self.token} token {self.token_kind.name}"

    @property
    def gpus(self) -> int:
        return sum(model.gpus for model in self.models)

    @property
    def dollars_per_hour(self) -> float | None:
        return _total([model.dollars_per_hour for model in self.models])

    @property
    def watts(self) -> float | None:
        return _total([model.watts for model in self.models])

    def cost(self, goal: Goal) -> float:
        value = {
            Goal.MACHINES: float(self.machines),
            Goal.COST: self.dollars_per_hour,
            Goal.POWER: self.watts,
        }[goal]
        return math.inf if value is None else value


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class IdleMemory:
    """KV memory of prompt machines, and the least of it that stood idle: prompts are counted as if they held theirs
    from their arrival on, transfers aside."""

    total_bytes: float
    idle_bytes: float

    @property
    def share(self) -> float:
        return self.idle_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """`budget_tokens` of a step, decodes included; None: by slack under the TBT target."""

    form: Form
    measures: Measures
    idle: IdleMemory
    budget_tokens: int | None = None

    def meets(self, target: float) -> bool:
        return self.measures.attainment >= target


@dataclass(slots=True)
class Plan:
    """Filled as the search goes on: what is known at an interruption is a plan, too, and says so by `complete`."""

    question: Question
    evaluated: list[Evaluated] = field(default_factory=list)
    with_moves: Measures | None = None
    complete: bool = False

    def best(self, split: bool | None = None) -> Evaluated | None:
        return next((e for e in self.ranked() if split is None or e.form.split is split), None)

    def ranked(self) -> list[Evaluated]:
        """First those that meet the target, the cheapest by the goal first; then others, by what they attain."""
        question = self.question

        def order(e: Evaluated) -> tuple[bool, float, float]:
            met, attained, cost = e.meets(question.target), -e.measures.attainment, e.form.cost(question.goal)
            return (not met, cost, attained) if met else (not met, attained, cost)

        return sorted(self.evaluated, key=order)

    def chosen(self) -> Evaluated | None:
        """What the verdict and the runs together say: a split only where the accounts allow one."""
        found = self.verdict()
        if found is None:
            return None
        return self.best(split=found.answer is Answer.SPLIT) or self.best()

    def ledger(self) -> KVLedger:
        """Of the best split that was run; of a pair of machines where none was."""
        question, best = self.question, self.best(split=True)
        means = traces.means(question.trace)
        links = min(best.form.prompt, best.form.token) if best is not None else 1
        kind = (best.form if best is not None else Form(question.kinds[0], question.kinds[0], 1, 1)).prompt_kind
        return KVLedger(kind.name, kind.kv_bytes_per_token, means.prompt_tokens, means.requests_per_second, links)

    def verdict(self) -> Verdict | None:
        """None before anything was run."""
        question = self.question
        one, two = self.best(split=False), self.best(split=True)
        if one is None and two is None:
            return None
        prompt_kind = two.form.prompt_kind if two is not None else question.kinds[0]
        token_kind = two.form.token_kind if two is not None else question.kinds[0]
        mixed_kind = one.form.prompt_kind if one is not None else question.kinds[0]
        load = loads(question.trace, question.used_slo, prompt_kind, token_kind)
        whole, chunk = mixed_steps(question.trace, question.used_slo, mixed_kind)
        passage = self.ledger().over(network_link(question.gbps))
        prompt_tokens = traces.means(question.trace).prompt_tokens
        computed = MachineProfile(prompt_kind).prompt_seconds(prompt_tokens)
        return verdict(
            Case(
                tbt_seconds=question.used_slo.tbt_seconds,
                target=question.target,
                machines=question.machines if question.machines is not None else question.most_machines,
                whole_step_seconds=whole,
                chunked_step_seconds=chunk,
                prompt_load=load[0],
                token_load=load[1],
                link_share=passage.share,
                kv_wait_seconds=_kv_wait(passage.seconds, computed, prompt_tokens, question.gbps),
                one_pool=_served(one, question.goal),
                split=_served(two, question.goal),
                offline=question.offline,
            )
        )


def _served(found: Evaluated | None, goal: Goal) -> Served | None:
    return Served(found.form.name, found.form.cost(goal), found.measures.attainment) if found is not None else None


def _kv_wait(kv_seconds: float, prompt_seconds: float, prompt_tokens: float, gbps: float) -> float:
    """Layer by layer beside the computation, the last layer alone stands behind it; short prompts leave after it."""
    network = Network(gbps * 1e9 / 8)
    if prompt_tokens < network.serial_below_tokens:
        return kv_seconds
    return max(kv_seconds - prompt_seconds, kv_seconds / network.layers)


def loads(trace: Trace, slo: Slo, prompt_kind: MachineModel, token_kind: MachineModel) -> tuple[float, float]:
    """Machines that prompts, and answers, keep busy: prompts one after another, answers in the largest batch that keeps
    TBT and fits. Infinite where not even one answer does."""
    means, prompts = traces.means(trace), MachineProfile(prompt_kind)
    prompt = sum(prompts.prompt_seconds(request.prompt_tokens) for request in trace) / trace.horizon_seconds
    context = means.prompt_tokens + means.output_tokens / 2
    tokens = MachineProfile(token_kind)
    batch = tokens.most_decodes(slo.tbt_seconds, context)
    if batch == 0:
        return prompt, math.inf
    step = tokens.decode_seconds(batch, batch * context)
    return prompt, means.requests_per_second * means.decode_steps * step / batch


def mixed_steps(trace: Trace, slo: Slo, kind: MachineModel) -> tuple[float, float]:
    """Seconds of a step with the 90th percentile of prompts whole, and with the chunk of the largest budget that keeps
    TBT, each beside the reference batch of decodes at the mean context."""
    means, profile = traces.means(trace), MachineProfile(kind)
    context = means.prompt_tokens + means.output_tokens / 2
    decodes = max(1, min(REFERENCE_DECODES, profile.most_decodes(slo.tbt_seconds, context)))
    ordered = sorted(request.prompt_tokens for request in trace)
    long = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    chunk = min(long, max(1, tuned_budget(profile, slo.tbt_seconds) - decodes))
    time = kind.step_time
    return (
        time.seconds((Chunk(0, long),), decodes, decodes * context),
        time.seconds((Chunk(0, chunk),), decodes, decodes * context),
    )


# The search.


def plan(
    question: Question,
    progress: Callable[[Form, float], None] | None = None,
    memory: PlanMemory | None = None,
) -> Generator[Plan, None, None]:
    """The same `Plan` after every run, ever better known; complete at the last. What `memory` has is not run again."""
    result = Plan(question)
    for split in (False, True):
        for form in _worth_running(_forms(question, split), result):
            result.evaluated.append(_recalled(question, form, progress, memory))
            yield result
            if question.machines is None and result.evaluated[-1].meets(question.target):
                break
    chosen = result.chosen()
    if chosen is not None and chosen.form.machines > 1:
        outcome, slo = _run(question, chosen.form, _options(chosen.budget_tokens, moves=True), progress)
        result.with_moves = measure(outcome, slo)
    result.complete = True
    yield result


def _worth_running(forms: Sequence[Form], known: Plan) -> Sequence[Form]:
    """In a search, no split that costs far more than one pool that does; the cheapest always, to compare with."""
    one, question = known.best(split=False), known.question
    if question.machines is not None or one is None or not one.meets(question.target):
        return forms
    most = MOST_COST_RATIO * one.form.cost(question.goal)
    return [form for place, form in enumerate(forms) if place == 0 or form.cost(question.goal) <= most]


def _recalled(
    question: Question, form: Form, progress: Callable[[Form, float], None] | None, memory: PlanMemory | None
) -> Evaluated:
    if memory is None:
        return _evaluate(question, form, progress)
    key = memory_key(question, form)
    kept = memory.recall(key)
    if kept is None:
        found = _evaluate(question, form, progress)
        memory.keep(key, {name: value for name, value in asdict(found).items() if name != "form"})
        return found
    measures = Measures.from_json(kept["measures"])
    return Evaluated(form, measures, IdleMemory(**kept["idle"]), kept["budget_tokens"])


# Steps that tell one table from another of the same name.
_ASKED = ((512, 0, 0.0), (4096, 0, 0.0), (0, 1, 1000.0), (0, 64, 64_000.0), (512, 32, 32_000.0))


def memory_key(question: Question, form: Form) -> str:
    """Equal where a run would be: the same release, load, targets, network, counts and kinds of machines."""
    return run_key(question, (form.prompt_kind, form.token_kind), (form.prompt, form.token, form.mixed))


def run_key(question: Question, kinds: Sequence[MachineModel], more: Sequence[object]) -> str:
    """`more`: whatever else of a run is to be the same."""

    def kind(model: MachineModel) -> tuple[object, ...]:
        seconds = [
            model.step_time.seconds((Chunk(0, prompt),) if prompt else (), decodes, context)
            for prompt, decodes, context in _ASKED
        ]
        return (model.name, model.kv_capacity_tokens, model.kv_bytes_per_token, model.pipeline_stages, *seconds)

    trace = question.trace
    requests = [(r.arrival_seconds, r.prompt_tokens, r.output_tokens, r.prefix) for r in trace]
    load = (requests, trace.horizon_seconds, question.used_slo, question.gbps)
    told = (version("poolwright"), load, *(kind(model) for model in kinds), tuple(more))
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _forms(question: Question, split: bool) -> list[Form]:
    """The cheapest first, and of equals the one nearest to the loads of the phases."""
    kinds, slo = question.kinds, question.used_slo
    numbers = [question.machines] if question.machines is not None else range(1, question.most_machines + 1)
    found: list[tuple[float, float, Form]] = []
    for prompt_kind in kinds:
        for token_kind in kinds if split else (prompt_kind,):
            prompt_load, token_load = loads(question.trace, slo, prompt_kind, token_kind)
            both = prompt_load + token_load
            begin = min(question.most_machines, math.floor(BEGIN_SHARE * both)) if math.isfinite(both) else 1
            for machines in numbers:
                if question.machines is None and machines < begin:
                    continue
                if not split:
                    form = Form(prompt_kind, prompt_kind, 0, 0, machines)
                    found.append((form.cost(question.goal), 0.0, form))
                    continue
                fair = machines * prompt_load / both if math.isfinite(both) and both > 0 else 1.0
                fair = min(max(fair, 1.0), machines - 1.0)
                for prompt in range(1, machines):
                    distance = abs(prompt - fair)
                    if question.around is None or distance <= question.around:
                        form = Form(prompt_kind, token_kind, prompt, machines - prompt)
                        found.append((form.cost(question.goal), distance, form))
    return [form for _, _, form in sorted(found, key=lambda row: row[:2])]


def setting_of(question: Question, models: Sequence[MachineModel]) -> Setting:
    means = traces.means(question.trace)
    return Setting(
        question.used_slo,
        models,
        question.gbps * 1e9 / 8,
        means.prompt_tokens,
        means.output_tokens,
        means.requests_per_second,
    )


def policy_of(form: Form, options: Options) -> Policy:
    return replace(ours(options, form.name), first_roles=lambda _: form.roles)


def _run(
    question: Question, form: Form, options: Options, progress: Callable[[Form, float], None] | None
) -> tuple[RunOutcome, Slo]:
    said = None if progress is None else lambda share: progress(form, share)
    setting = setting_of(question, form.models)
    return simulate(policy_of(form, options), question.trace, setting, Conditions(progress=said)), setting.slo


def _evaluate(question: Question, form: Form, progress: Callable[[Form, float], None] | None) -> Evaluated:
    """One pool with both ways to choose a budget, and the better counts: else a split would win by the worse one."""
    found = []
    for budget in (None,) if form.split else (None, _tuned(question, form.prompt_kind)):
        outcome, slo = _run(question, form, _options(budget, moves=False), progress)
        found.append(Evaluated(form, measure(outcome, slo), idle_memory(form, outcome), budget))
    return max(found, key=lambda e: e.measures.attainment)


def _options(budget_tokens: int | None, moves: bool) -> Options:
    if budget_tokens is None:
        return Options(moves=moves)
    return Options(moves=moves, slack_budget=False, step_tokens=budget_tokens)


def _tuned(question: Question, kind: MachineModel) -> int:
    return tuned_budget(MachineProfile(kind), question.used_slo.tbt_seconds)


def idle_memory(form: Form, outcome: RunOutcome) -> IdleMemory:
    kind = form.prompt_kind
    total = float(form.prompt * kind.kv_capacity_tokens * kind.kv_bytes_per_token)
    seconds = max(outcome.horizon_seconds, 1e-9)
    held = sum(
        r.prompt_tokens * (r.ttft_seconds or 0.0) * kind.kv_bytes_per_token
        for r in outcome.requests
        if r.prompt_uid is not None
    )
    return IdleMemory(total, max(0.0, total - held / seconds))


# What is to be served.


def read_csv(path: Path) -> Trace:
    """Columns arrival_seconds, prompt_tokens, output_tokens. Raises ValueError, OSError."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _CSV_COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(_CSV_COLUMNS)}")
        requests = [_request(path, number, row) for number, row in enumerate(rows)]
    if not requests:
        raise ValueError(f"{path} has no requests")
    first = min(request.arrival_seconds for request in requests)
    moved = [replace(request, arrival_seconds=request.arrival_seconds - first) for request in requests]
    last = max(request.arrival_seconds for request in moved)
    return traces.made(path.stem, moved, math.floor(last) + 1.0, str(path))


def _request(path: Path, number: int, row: dict[str, str]) -> Request:
    try:
        arrival, prompt, output = (
            float(row["arrival_seconds"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number + 2}: {error}") from error
    if not math.isfinite(arrival) or prompt < 1 or output < 1:
        raise ValueError(f"{path}, line {number + 2}: a time, and at least one prompt and one output token are needed")
    return Request(number, arrival, prompt, output)


def named_trace(name: str) -> Trace:
    """A recorded one by its name, or a CSV file. Raises ValueError, OSError."""
    if name in traces.RECORDED:
        return traces.recorded(name)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no trace {name!r} among {', '.join(traces.RECORDED)}, and no such file")
    return read_csv(path)


def at_rate(trace: Trace, requests_per_second: float | None, seconds: float, seed: int) -> Trace:
    """The first `seconds` of a trace, its arrivals repeated to that rate; None: as it is."""
    if seconds < trace.horizon_seconds:
        trace = traces.between(trace, 0.0, seconds)
    if requests_per_second is None or not len(trace):
        return trace
    return traces.scaled(trace, requests_per_second * trace.horizon_seconds / len(trace), seed)

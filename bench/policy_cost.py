"""What the policy costs: a routing choice, the same with a changed ledger, a decision; and a simulated hour.

    python bench/policy_cost.py [--machines 100] [--hour | --only-hour] [--json FILE]

The first three at 100 machines, as medians of rounds, in microseconds of CPU time. `--hour`: CPU seconds of one core
for the recorded hour of Azure's conversations on 40 machines, in the simulator's fast mode, with all machines mixed and
with this policy; as recorded, and with every arrival eight times. `--only-hour`: that hour as recorded and nothing
else, beside what it is to take at most; the exit code is 1 where it takes longer.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from poolwright.core.decide import decide
from poolwright.core.decision import Memory, Snapshot
from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import HistogramIncrease, LiveReading, MetricsReading, MetricsState
from poolwright.core.routing import Choice, RoutingRequest, Targets, choose
from poolwright.core.spec import MachineClass, Metric, Objective, PolicySpec, PoolBounds
from poolwright.sim.baselines.static_split import static_split
from poolwright.sim.ours import ours
from poolwright.sim.policy import Setting, Slo
from poolwright.sim.profiles import machine
from poolwright.sim.simulation import Conditions, simulate
from poolwright.sim.traces import azure_conversation, means, scaled
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

# Llama-70B on 8 H100, as fitted in the order of magnitude: what is timed does not depend on it.
PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.0108, 3.3e-5, 1.3e-8), mixed=StepCost(0.012, 4.1e-5, 1.3e-8)),
    step_tokens=4096,
    kv_capacity_tokens=1_500_000,
    kv_bytes_per_token=327_680,
)
TARGETS = Targets(1.0, 0.05)
_ROUNDS = 200
HOUR_MACHINE, HOUR_MACHINES, HOUR_FACTORS = "a100-llama-70b-tp4", 40, (1, 8)
HOUR_SECONDS = 60.0  # of one core, at most, for the hour as recorded


def machines(count: int) -> list[Machine]:
    """As the default start has them: one mixed, the rest alternating."""
    roles = [Role.MIXED, *(Role.PROMPT if i % 2 else Role.TOKEN for i in range(count - 1))]
    return [Machine(f"m{i}", f"u{i}", "c", "10.0.0.1", True, r, 1, 0.0, None, 0.0) for i, r in enumerate(roles)]


def spec(count: int) -> PolicySpec:
    return PolicySpec(
        objectives=(Objective("ttft", Metric.TTFT, 90, 1.0), Objective("tbt", Metric.TBT, 90, 0.05)),
        classes=(MachineClass("c", count),),
        pools={Role.PROMPT: PoolBounds(1), Role.TOKEN: PoolBounds(1), Role.MIXED: PoolBounds(0, 4)},
        max_moves_per_window=4,
    )


def reading(per_second: float) -> MetricsReading:
    """Mostly prompts, so that the plan has something to look for."""
    window = 120.0
    requests = per_second * window
    bounds = (*LATENCY_BUCKETS_SECONDS, float("inf"))

    def all_at(seconds: float, count: float) -> HistogramIncrease:
        return HistogramIncrease(bounds, tuple(count if seconds <= b else 0.0 for b in bounds))

    return MetricsReading(
        MetricsState.COMPLETE,
        window,
        ttft=all_at(0.4, requests),
        tbt=all_at(0.02, requests * 27),
        arrivals=requests,
        prompt_tokens=requests * 2048,
        output_tokens=requests * 28,
        in_flight=per_second,
    )


def median_microseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1000


def measure(count: int) -> dict[str, float]:
    fleet, ledger = machines(count), Ledger()
    ledger.keep(m.uid for m in fleet)
    for m in fleet:
        ledger.price(m.uid, PRICES)
    for n in range(count * 8):
        choice = choose(RoutingRequest(500 + n % 1500), fleet, ledger.loads(0.0), 0.0, TARGETS)
        assert isinstance(choice, Choice)
        ledger.begin(choice, 500 + n % 1500, 0.0, output_tokens=200).first_token(0.0)
    request, loads = RoutingRequest(1000, output_tokens=200), ledger.loads(1.0)

    def choose_and_count() -> None:
        choice = choose(request, fleet, ledger.loads(1.0), 1.0, TARGETS)
        if isinstance(choice, Choice):
            ledger.begin(choice, 1000, 1.0, output_tokens=200).close()

    made, live = spec(count), LiveReading(1000.0, ledger.work())
    snapshot = Snapshot(tuple(fleet), reading(count * 4.0), {"c": PRICES}, live)
    memory = decide(1000.0, snapshot, made, Memory())[1]
    return {
        "choose_us": median_microseconds(lambda: choose(request, fleet, loads, 1.0, TARGETS)),
        "choose_with_ledger_us": median_microseconds(choose_and_count),
        "decide_us": median_microseconds(lambda: decide(1060.0, snapshot, made, memory)),
    }


def hour(factors: Sequence[int] = HOUR_FACTORS) -> dict[str, float]:
    """CPU seconds by load and policy: as recorded, and with every arrival so many times that the machines are busy."""
    found: dict[str, float] = {}
    model = machine(HOUR_MACHINE)
    for factor in factors:
        trace = scaled(azure_conversation(), factor, seed=0)
        mean = means(trace)
        given = mean.prompt_tokens, mean.output_tokens, mean.requests_per_second
        setting = Setting(Slo(2.0, 0.1), [model] * HOUR_MACHINES, 25e9, *given)
        for name, policy in (("mixed", static_split(0, 0, HOUR_MACHINES)), ("ours", ours())):
            start = time.process_time()
            simulate(policy, trace, setting, Conditions(), seed=0)
            found[f"hour_x{factor}_{name}_s"] = time.process_time() - start
            print(f"  {len(trace)} requests, {name}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--hour", action="store_true", help="simulate the hour too")
    parser.add_argument("--only-hour", action="store_true", help="the hour as recorded, and whether it is quick enough")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = hour(HOUR_FACTORS[:1]) if options.only_hour else measure(options.machines)
    found |= hour() if options.hour else {}
    for name, value in found.items():
        print(f"{name:24} {value:8.1f}")
    if options.json:
        options.json.write_text(json.dumps({"machines": options.machines, **found}, indent=1) + "\n")
    if not options.only_hour:
        return 0
    slowest = max(found.values())
    held = "kept" if slowest <= HOUR_SECONDS else "NOT KEPT"
    print(f"at most {HOUR_SECONDS:.0f} s of one core: {held}")
    return 0 if slowest <= HOUR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

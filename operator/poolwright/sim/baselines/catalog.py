"""All baselines by name, started alike: what a comparison runs beside the static sweep."""

from collections.abc import Callable, Mapping

from poolwright.sim.baselines.arrow import arrow
from poolwright.sim.baselines.blitzscale import blitzscale
from poolwright.sim.baselines.distserve import distserve
from poolwright.sim.baselines.dopd import dopd
from poolwright.sim.baselines.dynamo import Target, dynamo
from poolwright.sim.baselines.dynamo_sla import dynamo_sla
from poolwright.sim.baselines.heteroscale import heteroscale
from poolwright.sim.baselines.hpa import hpa
from poolwright.sim.baselines.keda import keda
from poolwright.sim.baselines.mooncake import mooncake
from poolwright.sim.baselines.narwhal import narwhal
from poolwright.sim.baselines.one_pool import orca, sarathi, static_batching, vllm_v1
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.splitwise import splitwise
from poolwright.sim.baselines.tokenscale import tokenscale
from poolwright.sim.baselines.xllm import xllm
from poolwright.sim.policy import Policy


def baselines(prompt: int, router: MakeRouter = ShortestQueue) -> Mapping[str, Callable[[], Policy]]:
    """`prompt`: machines of the prompt pool at the start, where the policy does not choose it. `router`: for those
    whose source has no rule of its own. Each call makes a fresh policy, since some keep the memory of a run."""
    return {
        "sarathi": sarathi,
        "vllm": vllm_v1,
        "orca": orca,
        "static-batching": static_batching,
        "splitwise": lambda: splitwise(prompt),
        "splitwise-sim": lambda: splitwise(prompt, until_idle=True),
        "distserve": distserve,
        "mooncake": lambda: mooncake(prompt),
        "arrow": lambda: arrow(prompt),
        "xllm": lambda: xllm(prompt),
        "xllm-as-published": lambda: xllm(prompt, as_published=True),
        "narwhal": lambda: narwhal(prompt),
        "dynamo": lambda: dynamo(prompt, router=router),
        "dynamo-throughput": lambda: dynamo(prompt, Target.THROUGHPUT, router=router),
        "dynamo-latency": lambda: dynamo(prompt, Target.LATENCY, router=router),
        "dynamo-2025": lambda: dynamo_sla(prompt, router=router),
        "keda": lambda: keda(prompt, router=router),
        "hpa": lambda: hpa(prompt, router=router),
        "tokenscale": lambda: tokenscale(prompt),
        "heteroscale": lambda: heteroscale(prompt, router=router),
        "dopd": lambda: dopd(prompt, router=router),
        "blitzscale": lambda: blitzscale(prompt, router=router),
    }

"""Every machine does both phases: Sarathi-Serve with a tuned budget, vLLM V1, Orca, and static batching.

Nothing moves, so the batching of the engine is the whole policy. Requests go to the machine that has the fewest.
"""

from collections.abc import Callable

from poolwright.sim.baselines.profile import Profiles
from poolwright.sim.baselines.routers import FewestRequests, MakeRouter
from poolwright.sim.baselines.rules import tuned_budget
from poolwright.sim.policy import EngineRules, Policy, Setting
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role


def _one_pool(
    name: str, source: str, rules: Callable[[Setting], EngineRules], router: MakeRouter, **parameters: float
) -> Policy:
    return Policy(
        name=name,
        source=source,
        router=router,
        scaler=lambda setting: None,
        first_roles=lambda setting: [Role.MIXED] * len(setting.machines),
        rules=lambda setting: dict.fromkeys(Role, rules(setting)),
        parameters=parameters,
    )


def sarathi(budget: int | None = None, router: MakeRouter = FewestRequests) -> Policy:
    """Stall-free chunked prefill. `budget` None: the largest that keeps the TBT target (section 4.3)."""

    def rules(setting: Setting) -> EngineRules:
        tokens = budget or tuned_budget(Profiles(setting).first, setting.slo.tbt_seconds)
        return EngineRules(Batching.SARATHI, token_budget=tokens, max_sequences=128)

    name = f"Sarathi-Serve {budget}" if budget else "Sarathi-Serve tuned"
    return _one_pool(name, "Sarathi-Serve, OSDI '24, Algorithm 3", rules, router, budget=budget or 0)


def vllm_v1(router: MakeRouter = FewestRequests, budget: int | None = None) -> Policy:
    """The defaults of `vllm serve`: budget 2,048, or 8,192 with 1,024 sequences from 70 GB on other than A100.
    `budget`: its `--max-num-batched-tokens`, the sequences as they are."""

    def rules(setting: Setting) -> EngineRules:
        large = any(kind in setting.machines[0].name.upper() for kind in ("H100", "H200", "B200", "MI3"))
        tokens, sequences = (8192, 1024) if large else (2048, 256)
        return EngineRules(Batching.VLLM, token_budget=budget or tokens, max_sequences=sequences)

    source = "vLLM V1 scheduler and get_batch_defaults, v0.11, Apache-2.0"
    return _one_pool("vLLM V1", source, rules, router, budget=budget or 0)


def orca(max_sequences: int = 32, router: MakeRouter = FewestRequests) -> Policy:
    """Iteration-level batching of whole prompts with decodes, up to `max_sequences` requests."""

    def rules(setting: Setting) -> EngineRules:
        return EngineRules(Batching.ORCA, max_sequences=max_sequences)

    return _one_pool("Orca", "Orca, OSDI '22", rules, router, max_sequences=max_sequences)


def static_batching(max_sequences: int = 32, router: MakeRouter = FewestRequests) -> Policy:
    """A batch is served to its last token before the next begins, as FasterTransformer does."""

    def rules(setting: Setting) -> EngineRules:
        return EngineRules(Batching.STATIC, max_sequences=max_sequences)

    source = "request-level batching as the OSDI '22 paper on Orca describes FasterTransformer"
    return _one_pool("static batching", source, rules, router, max_sequences=max_sequences)

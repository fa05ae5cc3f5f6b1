"""Rules of the engines in a split cluster, and the budget of a mixed machine that Sarathi-Serve's rule gives."""

from collections.abc import Mapping
from dataclasses import replace

from poolwright.sim.baselines.profile import MachineProfile, Profiles
from poolwright.sim.policy import EngineRules, Policy, Setting
from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role

# Sarathi-Serve states its SLOs by a decode iteration of 32 requests with prompts of 4,096 tokens (OSDI '24, section 5).
REFERENCE_DECODES, REFERENCE_CONTEXT_TOKENS = 32, 4096
LEAST_BUDGET, MOST_BUDGET, TILE_TOKENS = 128, 2048, 128


def tuned_budget(profile: MachineProfile, tbt_seconds: float) -> int:
    """The most tokens of a step that keeps the TBT target with the reference batch (Sarathi-Serve, section 4.3); where
    that batch alone breaks it or does not fit, with the largest that does not."""
    fits = int(profile.model.kv_capacity_tokens / REFERENCE_CONTEXT_TOKENS)
    decodes = min(REFERENCE_DECODES, fits, profile.most_decodes(tbt_seconds, REFERENCE_CONTEXT_TOKENS))
    context = decodes * REFERENCE_CONTEXT_TOKENS
    for budget in range(MOST_BUDGET, LEAST_BUDGET, -TILE_TOKENS):
        chunk = Chunk(0, budget - decodes)
        if profile.model.step_time.seconds((chunk,), decodes, context) <= tbt_seconds:
            return budget
    return LEAST_BUDGET


def split_rules(setting: Setting) -> Mapping[Role, EngineRules]:
    """Prompt machines at Splitwise's batch of 2,048 tokens; token and mixed machines, should prompts come there, by
    Sarathi-Serve with its tuned budget."""
    budget = tuned_budget(Profiles(setting).first, setting.slo.tbt_seconds)
    chunked = EngineRules(Batching.SARATHI, token_budget=budget)
    return {
        Role.PROMPT: EngineRules(Batching.SARATHI, token_budget=2048),
        Role.TOKEN: chunked,
        Role.MIXED: chunked,
    }


def in_blocks(policy: Policy, block_tokens: int) -> Policy:
    """The same with KV caches of such blocks."""

    def rules(setting: Setting) -> Mapping[Role, EngineRules]:
        return {role: replace(rule, block_tokens=block_tokens) for role, rule in policy.rules(setting).items()}

    return replace(policy, rules=rules)

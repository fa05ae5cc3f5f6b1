"""One pool as the papers' baselines run it, behind the simulator's protocol."""

from poolwright.sim.baselines.routers import FewestRequests, MakeRouter
from poolwright.sim.policy import EngineRules, Policy
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role

# vLLM before it cut prompts: whole prompts first and alone, as many as fit.
OLD_VLLM = EngineRules(Batching.PREFILL_FIRST, token_budget=2048, max_sequences=256)
# DeepSpeed-MII: chunks beside decodes, `max_ragged_batch_size` of 768 tokens by default.
SPLIT_FUSE = EngineRules(Batching.SARATHI, token_budget=768, max_sequences=256)
# Splitwise's baseline, mixed continuous batching: whole prompts beside decodes, 2,048 tokens of prompts a step.
MIXED_BATCHING = EngineRules(Batching.ORCA, token_budget=2048, max_sequences=512)


def one_pool(name: str, rules: EngineRules, router: MakeRouter = FewestRequests) -> Policy:
    return Policy(
        name=name,
        source="a baseline as its paper describes it",
        router=router,
        scaler=lambda setting: None,
        first_roles=lambda setting: [Role.MIXED] * len(setting.machines),
        rules=lambda setting: dict.fromkeys(Role, rules),
    )

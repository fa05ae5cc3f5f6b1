"""What a step may hold by the rules of a policy, where the engine's options do not say it themselves."""

from poolwright.sim.policy import EngineRules
from poolwright_engine.scheduling.scheduler_config import Batching


def whole_prompt_budget(rules: EngineRules, head_tokens: int, decodes: int) -> int:
    """Tokens of a step that cuts no prompt: the first in line goes whatever its length."""
    budget = rules.most_tokens if rules.token_budget is None else rules.token_budget
    return max(budget, head_tokens + (decodes if rules.batching is Batching.ORCA else 0))


def cuts_prompts(rules: EngineRules) -> bool:
    return rules.batching in (Batching.SARATHI, Batching.VLLM)


def seats(rules: EngineRules) -> int:
    """A step holds a token of everyone who decodes."""
    most = rules.most_tokens if rules.token_budget is None else rules.token_budget
    return min(rules.max_sequences, most)

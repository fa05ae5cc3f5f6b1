"""Two unrelated HPAs: prompt machines by queue length, token machines by KV use.

What production-stack and KServe users deploy: `vllm:num_requests_waiting` above 5 adds a pod (vllm-project/
production-stack @a6c01db, KEDA example), under autoscaling/v2's defaults. Token machines queue nothing until their
memory is full, so their metric is KV use with the usual target of 80 %.
"""

from collections.abc import Sequence

from poolwright.sim.baselines.autoscaler import SYNC_SECONDS, Replicas, average_value
from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import ClusterView, Policy, RoleChange
from poolwright_protocol.roles import Role

WAITING_TARGET = 5.0
KV_TARGET = 0.8


class QueueLength:
    period_seconds = SYNC_SECONDS

    def __init__(self, waiting_target: float = WAITING_TARGET, kv_target: float = KV_TARGET) -> None:
        self._waiting_target, self._kv_target = waiting_target, kv_target
        self._prompt, self._token = Replicas(), Replicas()

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        prompts = [m for m in view.machines if m.role is Role.PROMPT]
        tokens = [m for m in view.machines if m.role is Role.TOKEN]
        if not prompts or not tokens:
            return []
        # One prompt of each queue is being computed.
        waiting = [float(max(0, len(m.waiting_prompts) - 1)) for m in prompts]
        uses = [m.kv_used_tokens / m.model.kv_capacity_tokens for m in tokens]
        wanted = (
            self._prompt.wish(now, len(prompts), average_value(waiting, self._waiting_target, len(prompts))),
            self._token.wish(now, len(tokens), average_value(uses, self._kv_target, len(tokens))),
        )
        return moves_to(view, fitted(prompt_count(view), *wanted, len(view.machines)), "HPA")


def hpa(
    prompt: int,
    router: MakeRouter = ShortestQueue,
    waiting_target: float = WAITING_TARGET,
    kv_target: float = KV_TARGET,
) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    return Policy(
        name="HPA on queue length",
        source="Kubernetes autoscaling/v2; targets of vllm-project/production-stack @a6c01db, Apache-2.0",
        router=router,
        scaler=lambda setting: QueueLength(waiting_target, kv_target),
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"waiting_target": waiting_target, "kv_target": kv_target},
    )

"""From the resource's spec to the policy's: the one place where milliseconds become seconds. No decision here."""

from poolwright.api.models import InferencePoolSpec
from poolwright.core import spec as core
from poolwright_protocol.roles import Role


def policy_spec(spec: InferencePoolSpec) -> core.PolicySpec:
    return core.PolicySpec(
        objectives=tuple(
            core.Objective(o.name, core.Metric(o.metric.value), o.percentile, o.target_milliseconds / 1000)
            for o in spec.slo.objectives
        ),
        classes=tuple(core.MachineClass(m.name, m.replicas, frozenset(r.role for r in m.roles)) for m in spec.machines),
        pools={
            role: core.PoolBounds(bounds.min, bounds.max, bounds.replicas, bounds.max_prefill_tokens_per_step)
            for role in Role
            for bounds in [spec.pools.of(role)]
        },
        mode=core.Mode(spec.rebalance.mode.value),
        interval_seconds=spec.rebalance.interval_seconds,
        metrics_window_seconds=spec.rebalance.metrics_window_seconds,
        dwell_seconds=spec.rebalance.dwell_seconds,
        max_moves_per_window=spec.rebalance.max_moves_per_window,
        window_seconds=spec.rebalance.window_seconds,
    )

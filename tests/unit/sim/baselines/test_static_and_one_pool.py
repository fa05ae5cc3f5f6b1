"""The sweep is whole; Sarathi-Serve's budget keeps the target; one pool sends each request where the fewest are."""

import pytest

from poolwright.sim.baselines.one_pool import orca, sarathi, static_batching, vllm_v1
from poolwright.sim.baselines.profile import MachineProfile
from poolwright.sim.baselines.rules import REFERENCE_CONTEXT_TOKENS, tuned_budget
from poolwright.sim.baselines.static_split import every_split
from poolwright.sim.policy import Placement
from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role
from support.line_machine import MODEL, arrival, cluster, machine, setting


@pytest.mark.parametrize("machines", [2, 4, 8])
def test_every_split_is_in_the_sweep_once(machines: int) -> None:
    policies = list(every_split(machines, most_mixed=1))
    roles = [tuple(p.first_roles(setting(machines))) for p in policies]
    counts = {(r.count(Role.PROMPT), r.count(Role.MIXED), r.count(Role.TOKEN)) for r in roles}
    pure = {(p, 0, machines - p) for p in range(1, machines)}
    one_mixed = {(p, 1, machines - 1 - p) for p in range(machines)}
    assert counts == pure | one_mixed | {(0, machines, 0)}
    assert len(counts) == len(policies) == len({p.name for p in policies})


@pytest.mark.parametrize("tbt", [0.02, 0.05, 0.1, 0.5])
def test_the_tuned_budget_is_the_largest_that_keeps_the_target(tbt: float) -> None:
    profile = MachineProfile(MODEL)
    budget = tuned_budget(profile, tbt)
    fits = MODEL.kv_capacity_tokens // REFERENCE_CONTEXT_TOKENS
    decodes = min(32, fits, profile.most_decodes(tbt, REFERENCE_CONTEXT_TOKENS))

    def seconds(tokens: int) -> float:
        return MODEL.step_time.seconds((Chunk(0, tokens - decodes),), decodes, decodes * REFERENCE_CONTEXT_TOKENS)

    assert budget % 128 == 0
    assert budget == 128 or seconds(budget) <= tbt
    assert budget == 2048 or seconds(budget + 128) > tbt


def test_one_pool_batches_as_its_name_says() -> None:
    for policy, batching in (
        (sarathi(512), Batching.SARATHI),
        (vllm_v1(), Batching.VLLM),
        (orca(), Batching.ORCA),
        (static_batching(), Batching.STATIC),
    ):
        assert set(policy.first_roles(setting())) == {Role.MIXED}
        assert {r.batching for r in policy.rules(setting()).values()} == {batching}
        assert policy.scaler(setting()) is None
    assert sarathi(512).rules(setting())[Role.MIXED].token_budget == 512


def test_one_pool_sends_a_request_where_the_fewest_are() -> None:
    busy = machine("a", Role.MIXED, waiting_prompts=(10,), decodes=3)
    free = machine("b", Role.MIXED, waiting_prompts=(9000,), decodes=1)
    assert sarathi().router(setting()).route(0.0, arrival(), cluster(busy, free)) == Placement("b")

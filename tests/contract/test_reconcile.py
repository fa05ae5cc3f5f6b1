"""What `reconcile` makes of a pool, without Kubernetes: births, a settled world, moves, restarts, bad news."""

from dataclasses import replace

import pytest

from poolwright.controller.ports import ChildrenState
from poolwright_protocol.roles import Role
from support.standing_pool import ROUTER, Load, StandingPool, standing_pool

GOOD = Load(4, ttft_seconds=0.2, tbt_seconds=0.02)
SLOW_PROMPTS = Load(4, ttft_seconds=5.0, tbt_seconds=0.02)


async def born(pool: StandingPool, load: Load | None = None) -> None:
    await pool.live(20, load)
    assert sum(pool.split.values()) == 3


def kinds(pool: StandingPool) -> list[str]:
    return [event.reason for event in pool.events]


async def test_new_machines_get_roles_that_meet_every_minimum() -> None:
    async with standing_pool() as pool:
        await born(pool)
        assert pool.split == {Role.PROMPT: 1, Role.TOKEN: 1, Role.MIXED: 1}
        assert pool.status["pools"]["prompt"] == {"ready": 1, "desired": 1}
        assert "recentMoves" not in pool.status or pool.status["recentMoves"] == []
        for machine in await pool.bed.machines.list():
            state = pool.bed.engine(machine.name).role_state()
            assert (machine.role, machine.role_epoch) == (state.role, state.epoch)


@pytest.mark.parametrize("load", [None, GOOD], ids=["idle", "constant traffic"])
async def test_a_settled_world_is_not_written(load: Load | None) -> None:
    async with standing_pool() as pool:
        await born(pool, load)
        await pool.live(40, load)
        writes, events = pool.bed.machines.writes, list(pool.events)
        status_writes = pool.store.status_writes
        for _ in range(3):
            await pool.live(30, load)
        assert pool.bed.machines.writes == writes
        assert pool.store.status_writes == status_writes
        assert pool.events == events


async def test_a_second_look_at_once_writes_nothing() -> None:
    async with standing_pool() as pool:
        await born(pool)
        writes = pool.writes
        await pool.look()
        await pool.look()
        assert pool.writes == writes


async def test_a_missed_ttft_moves_a_machine_to_the_prompt_pool_and_says_so() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        await pool.live(25, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 2
        assert pool.split[Role.TOKEN] >= 1
        [move, *_] = pool.status["recentMoves"]
        assert (move["to"], move["reason"], move["outcome"]) == ("Prompt", "TTFTMissed", "Completed")
        assert move["durationMilliseconds"] >= 0
        assert move["drainedSeconds"] == 0
        assert move["machine"] in pool.status["lastMove"]["summary"]
        assert any(d["reason"] == "TTFTMissed" and d["moves"] for d in pool.status["decisions"])
        assert [k for k in kinds(pool) if k.startswith("Move")] == ["MoveBegun", "MoveCompleted"]
        assert kinds(pool).count("SLOMissed") == 1
        assert pool.condition("SLOMet")["status"] == "False"
        assert pool.condition("Rebalancing")["status"] == "False"


async def test_a_move_is_in_the_status_before_it_can_end() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        for _ in range(15):
            await pool.live(2, SLOW_PROMPTS)
            moving = [m for m in await pool.bed.machines.list() if m.move]
            recorded = {m["uid"] for m in pool.status.get("recentMoves", ())}
            assert {m.uid for m in moving} <= recorded
        assert pool.split[Role.PROMPT] == 2


async def test_a_restarted_operator_remembers_its_moves_and_repeats_no_event() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        await pool.live(25, SLOW_PROMPTS)
        moves, events = pool.status["recentMoves"], len(pool.events)
        pool.restart_operator()
        writes = pool.bed.machines.writes
        await pool.look()
        assert pool.status["recentMoves"] == moves
        assert pool.bed.machines.writes == writes
        assert len(pool.events) == events


async def test_a_status_that_does_not_parse_holds_moves_for_a_window_and_is_replaced() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        pool.store.status = {"recentMoves": "garbled", "conditions": 7}
        pool.restart_operator()
        await pool.live(40, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 1
        assert pool.status["decisions"][-1]["reason"] == "MemoryUnreadable"
        await pool.live(60, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 2


async def test_a_rolled_back_move_is_recorded_and_followed_by_a_cool_down() -> None:
    async with standing_pool(dwellSeconds=30) as pool:
        pool.memory.refresh_seconds = 1.0
        await born(pool, GOOD)
        for machine in await pool.bed.machines.list():
            pool.bed.engine(machine.name).busy = True
        await pool.live(80, SLOW_PROMPTS)
        moving = [m for m in await pool.bed.machines.list() if m.move]
        assert len(moving) == 1
        for machine in await pool.bed.machines.list():
            pool.bed.engine(machine.name).end_step()
        await pool.live(5, SLOW_PROMPTS)
        [move] = pool.status["recentMoves"]
        assert move["outcome"] == "RolledBack"
        assert pool.split == {Role.PROMPT: 1, Role.TOKEN: 1, Role.MIXED: 1}
        assert "MoveRolledBack" in kinds(pool)
        begun = pool.status["recentMoves"]
        await pool.live(20, SLOW_PROMPTS)
        assert pool.status["decisions"][-1]["reason"] in ("CoolingDown", "Dwelling")
        assert pool.status["recentMoves"] == begun
        await pool.live(20, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 2


async def test_a_machine_that_goes_while_it_moves_is_lost() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        for machine in await pool.bed.machines.list():
            pool.bed.engine(machine.name).busy = True
        await pool.live(25, SLOW_PROMPTS)
        [moving] = [m for m in await pool.bed.machines.list() if m.move]
        await pool.bed.delete(moving.name)
        await pool.live(2)
        assert pool.status["recentMoves"][-1]["outcome"] == "Lost"
        assert "MoveLost" in kinds(pool)


async def test_paused_and_advisory_begin_no_move() -> None:
    async with standing_pool(mode="Paused") as pool:
        await born(pool, GOOD)
        await pool.live(30, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 1
        assert pool.condition("Paused")["status"] == "True"
        pool.store.edit(lambda spec: spec["rebalance"].update(mode="Advisory"))
        await pool.live(40, SLOW_PROMPTS)
        assert pool.split[Role.PROMPT] == 1
        advised = [d for d in pool.status["decisions"] if d["mode"] == "Advisory" and d.get("moves")]
        assert advised[-1]["moves"][0]["to"] == "Prompt"
        assert pool.condition("Paused")["status"] == "False"


async def test_metrics_that_vanish_are_a_condition_with_the_failing_scrape_and_stop_moves() -> None:
    async with standing_pool() as pool:
        await born(pool, GOOD)
        pool.router.close()
        await pool.live(30)
        condition = pool.condition("MetricsAvailable")
        assert condition["status"] == "False"
        assert pool.router.url in condition["message"]
        assert pool.status["metrics"] in ("Stale", "Missing")
        assert all(o["state"] == "Unknown" for o in pool.status["objectives"])
        assert pool.split == {Role.PROMPT: 1, Role.TOKEN: 1, Role.MIXED: 1}
        assert kinds(pool).count("MetricsUnavailable") == 1  # now; not at the start, when nothing can be measured yet
        pool.router.listen()


async def test_a_pool_below_its_minimum_is_repaired_without_metrics() -> None:
    async with standing_pool() as pool:
        await born(pool)
        pool.router.close()
        [prompt] = [m for m in await pool.bed.machines.list() if m.role is Role.PROMPT]
        await pool.bed.delete(prompt.name)
        await pool.live(10)
        assert pool.split[Role.PROMPT] == 1
        assert pool.status["recentMoves"][-1]["repair"] is True
        pool.router.listen()


async def test_a_label_changed_by_hand_is_repaired_with_an_event() -> None:
    async with standing_pool() as pool:
        await born(pool)
        before = pool.split
        [token] = [m for m in await pool.bed.machines.list() if m.role is Role.TOKEN]
        await pool.bed.edit_by_hand(token.name, Role.PROMPT)
        await pool.look()
        assert pool.split == before
        assert kinds(pool).count("RoleRepaired") == 1
        await pool.live(20)
        assert kinds(pool).count("RoleRepaired") == 1


async def test_children_in_trouble_become_conditions() -> None:
    async with standing_pool() as pool:
        await born(pool)
        gone = "3 engine pods: container engine ended with code 2: --model: model path /models/tiny does not exist"
        pool.children.state = replace(
            pool.children.state, conflicts=("Deployment chat-small-abc is owned by another",), problems=(gone,)
        )
        await pool.look()
        assert pool.condition("ModelAvailable")["reason"] == "ModelPathMissing"
        assert "/models/tiny" in pool.condition("ModelAvailable")["message"]
        assert pool.condition("ChildConflict")["status"] == "True"
        assert pool.condition("Progressing")["reason"] == "Blocked"
        assert {"ModelMissing", "ChildConflict"} <= set(kinds(pool))


async def test_without_a_ready_router_it_is_not_available() -> None:
    async with standing_pool() as pool:
        await born(pool)
        assert pool.condition("Available")["status"] == "True"
        pool.children.state = ChildrenState(routers_ready=0, routers_desired=1, router_uids=(ROUTER,))
        await pool.look()
        assert (pool.condition("Available")["status"], pool.condition("Available")["reason"]) == (
            "False",
            "NoReadyRouter",
        )
        assert "Unavailable" in kinds(pool)


async def test_an_edit_of_the_spec_is_observed() -> None:
    async with standing_pool() as pool:
        await born(pool)
        pool.store.edit(lambda spec: spec["slo"]["objectives"][0].update(targetMilliseconds=500))
        await pool.look()
        assert pool.status["observedGeneration"] == 2
        assert pool.status["objectives"][0]["targetMilliseconds"] == 500

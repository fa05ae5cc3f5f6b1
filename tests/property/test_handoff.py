"""Any one or two faults on the wire, a client that leaves at any moment, memory short on either side: every stream
that is read to its end has the tokens of one machine alone, and all blocks come home on both machines."""

import asyncio
import contextlib
from contextlib import aclosing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poolwright_engine.loop.engine import Refused
from poolwright_engine.scheduling.sequence import FinishReason
from support.engine_bed import Machine, machine, request
from support.faulty_wire import Bad, Fault, relay
from support.scripted_runner import ScriptedRunner, expected

# Short, so that silence is found out soon.
QUICK = {"lease_seconds": 0.25, "hold_seconds": 0.2, "connect_seconds": 0.5, "piece_bytes": 100}

faults = st.builds(Fault, st.sampled_from(Bad), st.booleans(), st.integers(0, 12))
wires = st.lists(faults, max_size=2)
clients = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 10), st.one_of(st.none(), st.none(), st.integers(0, 5))),
    min_size=1,
    max_size=4,
)


async def read(t: Machine, p: Machine, port: int, number: int, client: tuple[int, int, int | None]) -> None:
    """`leaves_after`: how many tokens this client reads before it goes; None: all."""
    prompt, max_tokens, leaves_after = client
    ticket = p.ticket(port=port)
    asked = request(range(number, number + prompt), max_tokens, ticket, seed=number, temperature=float(number % 2))
    heard: list[int] = []
    async with aclosing(t.engine.generate(asked)) as stream:
        with contextlib.suppress(Refused):
            while leaves_after is None or len(heard) < leaves_after:
                output = await anext(stream)
                heard.extend(output.token_ids)
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.LENGTH
                    assert len(heard) == max_tokens
                    break
    assert heard == expected(asked)[: len(heard)]


async def serve(
    control: list[Fault],
    data: list[Fault],
    asked: list[tuple[int, int, int | None]],
    p_blocks: int,
    t_blocks: int,
    share: int,
) -> None:
    async with (
        machine("p", num_blocks=p_blocks, handoff=QUICK, max_model_len=64, ungranted_share_percent=share) as p,
        machine("t", num_blocks=t_blocks, handoff=QUICK, max_model_len=64) as t,
    ):
        assert p.exchange is not None
        assert t.exchange is not None
        async with relay(p.exchange.port, *control) as to_p, relay(t.exchange.port, *data) as to_t:
            t.exchange.port = to_t.port
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for number, client in enumerate(asked, 1):
                    group.create_task(read(t, p, to_p.port, number, client))
            await t.empty()
            await p.empty()


@pytest.mark.timeout(300)
@settings(max_examples=30, deadline=None)
@given(wires, wires, clients, st.integers(17, 40), st.integers(17, 40), st.sampled_from([0, 25, 100]))
@example([Fault(Bad.SILENCE, True, 2)], [], [(30, 5, None)], 40, 40, 25)
@example([], [Fault(Bad.CORRUPT, False, 1)], [(30, 5, None)], 40, 40, 25)
@example([], [Fault(Bad.DROPPED, False, 2)], [(30, 5, None)], 40, 40, 25)
@example([], [Fault(Bad.CUT, True, 0)], [(30, 5, None)], 40, 40, 25)
@example([Fault(Bad.DROPPED, True, 1)], [], [(30, 5, None)], 40, 40, 25)
def test_any_fault_costs_time_but_no_token_and_no_block(
    control: list[Fault],
    data: list[Fault],
    asked: list[tuple[int, int, int | None]],
    p_blocks: int,
    t_blocks: int,
    share: int,
) -> None:
    asyncio.run(serve(control, data, asked, p_blocks, t_blocks, share))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bad", list(Bad))
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("which", ["control", "data"])
def test_each_fault_at_each_message(bad: Bad, back: bool, which: str) -> None:
    """Every message of one hand-off in turn, in both directions, on both connections."""

    async def all_frames() -> None:
        for frame in range(4 if back or which == "control" else 12):
            fault = [Fault(bad, back, frame)]
            control, data = (fault, []) if which == "control" else ([], fault)
            await serve(control, data, [(30, 5, None)], 40, 40, 25)

    asyncio.run(all_frames())


@pytest.mark.parametrize("broken_step", range(5))
def test_a_prompt_machine_that_dies_at_any_step_costs_no_token(broken_step: int) -> None:
    async def run() -> None:
        broken = ScriptedRunner(64, 4, fail_at=broken_step)
        async with machine("p", runner=broken, handoff=QUICK) as p, machine("t", handoff=QUICK) as t:
            assert p.exchange is not None
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for number in range(1, 5):
                    group.create_task(read(t, p, p.exchange.port, number, (45, 6, None)))
            await t.empty()

    asyncio.run(run())

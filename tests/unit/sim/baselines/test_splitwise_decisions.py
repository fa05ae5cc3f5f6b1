"""The mixed pool pairs, lends and takes back as splitwise-sim's own code did, given the output length it was given."""

from collections.abc import Callable
from typing import Any

from poolwright.sim.baselines.splitwise import MixedPool, Seat
from poolwright_protocol.roles import Role


def test_pairs_and_pools_are_those_of_splitwise_sim(recorded: Callable[[str], Any]) -> None:
    count = 0
    for sequence in recorded("splitwise-sim-mixed-pool"):
        pools = MixedPool()
        seats = [Seat(f"m{i}", Role(tag), sequence["room"]) for i, tag in enumerate(sequence["tags"])]
        for seat in seats:
            pools.add(seat)
        by_uid = {s.uid: s for s in seats}
        for step in sequence["steps"]:
            if step[0] == "free":
                pools.go_home(by_uid[step[1]])
                expected = step[2:]
            else:
                _, prompt_tokens, output_tokens, states, prompt_uid, token_uid, *expected = step
                for seat, (pending, queued, kv_tokens) in zip(seats, states, strict=True):
                    seat.pending_tokens, seat.queued, seat.reserved_tokens = pending, queued > 0, kv_tokens
                before = [s.uid for s in pools.mixed]
                prompt, token, lent = pools.pair(prompt_tokens, output_tokens)
                assert (prompt.uid, token.uid) == (prompt_uid, token_uid), step
                assert before + [s.uid for s in lent] == [s.uid for s in pools.mixed]
            assert [[s.uid for s in p] for p in (pools.prompt, pools.mixed, pools.token)] == expected, step
            count += 1
    assert count >= 1000

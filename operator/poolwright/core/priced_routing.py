"""The choice of machines where work has a price and targets are known: who is in time, and who loses least by it.

Prompts join the shortest queue in seconds, over prompt, mixed and lent machines, a cached prefix off the price: so a
hot machine is left once its wait exceeds the recompute. Streams are packed: on the fullest machine whose step stays
within the target with the margin (xLLM-service, PolyServe), which keeps others free to be lent or moved; where none
does, on the one with the shortest step.

Where neither a pair nor a mixed machine is in time, a request goes whole to a token machine or to a prompt machine:
Splitwise's move to the mixed pool, for one request. A token machine is lent if it has room for a chunk, and if its pool
would hold its own with one fewer (xLLM-service), since steps with chunks keep others' second tokens waiting. Where
those come late in any case, because no token machine's step leaves them the time, it is lent as a mixed machine is
used: so that a split which does not fit the targets costs little until it is changed.

One pass over the machines, since a choice is made for each request.
"""

from collections.abc import Mapping, Sequence

from poolwright.core.machine import Machine
from poolwright.core.pricing import HANDOFF_SECONDS, STEP_MARGIN, MachinePrices, split_step_seconds
from poolwright.core.routes import IDLE, Choice, Load, Route, RoutingRequest, Targets
from poolwright_protocol.roles import Role

# Of each step, what an engine keeps for the prompt that came first (`scheduling.batching`).
_SHARE_OF_FIRST = 0.25


def choose_priced(
    request: RoutingRequest, machines: Sequence[Machine], loads: Mapping[str, Load], now: float, targets: Targets
) -> Choice | None:
    """None where it cannot be said: a machine without a price, or none that is sound, settled and of either phase."""
    tried, cached, n = request.tried, request.cached_tokens, request.prompt_tokens
    most = n + request.output_tokens
    tbt = targets.tbt_seconds
    full_seconds = tbt / STEP_MARGIN
    most_seconds = split_step_seconds(tbt) if targets.every_gap else tbt
    packed_seconds = most_seconds / STEP_MARGIN
    known: MachinePrices | None = None  # the last price list seen: machines mostly share one
    alone = kv_seconds = 0.0
    late_pairs = targets.every_gap  # even where nobody else decodes
    prompts: list[tuple[float, float, str, Machine]] = []
    whole: list[tuple[Machine, Load]] = []
    tokens: list[tuple[float, str, Machine, Load]] = []
    packed_step = -1.0
    packed: Machine | None = None
    for machine in machines:
        if not machine.ready or machine.move is not None or machine.deleting or machine.host is None:
            continue
        uid = machine.uid
        load = loads.get(uid, IDLE)
        if load.avoid_until > now or uid in tried:
            continue
        prices = load.prices
        if prices is None:
            return None
        if prices is not known:
            known, alone = prices, prices.prefill_seconds(n)
            # Of this stream, half way through its answer.
            kv_seconds = (n + request.output_tokens / 2) * prices.profile.decode.kv_token_seconds
            late_pairs = late_pairs and prices.decode_seconds(1, 0) + kv_seconds > most_seconds
        role = machine.role
        if role is Role.PROMPT:
            free_at = load.free_at
            end = (free_at if free_at > now else now) + alone
            if cached and uid in cached:
                end += prices.prefill_seconds(n, cached[uid]) - alone
            prompts.append((end, load.recent_tokens, uid, machine))
            if load.lent:
                whole.append((machine, load))
            continue
        step = load.next_step_seconds + kv_seconds
        if load.kv_free_tokens < most:
            step += tbt  # full: streams would be preempted
        does_both = role is not Role.TOKEN or load.lent
        if does_both:
            whole.append((machine, load))
            if targets.every_gap and step < full_seconds:
                step = full_seconds  # its steps hold chunks, as large as the target lets them be
        tokens.append((step, uid, machine, load))
        if packed_step < step <= packed_seconds or (
            step == packed_step and packed is not None and uid < packed.uid and step <= packed_seconds
        ):
            packed_step, packed = step, machine
    if not tokens or not (prompts or whole):
        return None

    best_prompt = min(prompts, default=None)
    best_whole = _best_whole(request, whole, now, targets)
    least = min(tokens)  # uids differ, so machines are never compared
    token = packed or least[2]
    deadline = now + targets.ttft_seconds
    pair_end = best_prompt[0] + HANDOFF_SECONDS if best_prompt else float("inf")
    whole_end = best_whole[0] if best_whole else float("inf")
    in_step = packed is not None or least[0] <= most_seconds
    pair_is_fine = in_step and pair_end <= deadline
    whole_is_fine = whole_end <= deadline

    if not pair_is_fine and not whole_is_fine:
        others = _lendable(tokens, tbt) if late_pairs else _to_spare(tokens, most_seconds)
        # A prompt machine's steps are as large as its bound lets them be, and streams would feel it.
        others += [
            (m, loads[uid])
            for _, _, uid, m in prompts
            if not loads[uid].lent and not (targets.every_gap and loads[uid].prefill_bound is None)
        ]
        borrowed = _best_whole(request, others, now, targets)
        if borrowed is not None and borrowed[0] < (min(pair_end, whole_end) if in_step else whole_end):
            route = Route.BORROWED_FOR_PROMPT if borrowed[2].role is Role.TOKEN else Route.BORROWED_FOR_TOKENS
            if borrowed[0] <= deadline or pair_end > deadline:
                return Choice(borrowed[2], None, route, borrowed[0] - now, _step_of(borrowed[2], tokens))
    if best_whole is not None and (
        best_prompt is None
        or (whole_is_fine and not pair_is_fine)
        or (whole_is_fine == pair_is_fine and whole_end <= pair_end)
    ):
        route = Route.PREFIX if best_whole[2].uid in cached else Route.MIXED
        return Choice(best_whole[2], None, route, whole_end - now, _step_of(best_whole[2], tokens))
    if best_prompt is None:
        # Mixed machines alone, and all of them full: the one that is soonest done with what it has.
        best_whole = _best_whole(request, whole, now, targets, needs_room=False)
        return Choice(best_whole[2], None, Route.MIXED, best_whole[0] - now) if best_whole else None
    if n - cached.get(token.uid, 0) <= request.local_prompt_tokens:
        local = _whole_end(request, token, loads[token.uid], now, targets)
        if local <= pair_end:
            return Choice(token, None, Route.SHORT_PROMPT, local - now, _step_of(token, tokens))
    route = Route.PREFIX if best_prompt[2] in cached else Route.SPLIT
    return Choice(token, best_prompt[3], route, pair_end - now, _step_of(token, tokens))


def _step_of(machine: Machine, tokens: Sequence[tuple[float, str, Machine, Load]]) -> float | None:
    return next((step for step, uid, _, _ in tokens if uid == machine.uid), None)


def _lendable(tokens: Sequence[tuple[float, str, Machine, Load]], most_seconds: float) -> list[tuple[Machine, Load]]:
    """Token machines within the target."""
    return [(m, at) for step, _, m, at in tokens if m.role is Role.TOKEN and not at.lent and step <= most_seconds]


def _to_spare(tokens: Sequence[tuple[float, str, Machine, Load]], most_seconds: float) -> list[tuple[Machine, Load]]:
    """Token machines whose pool would hold its own with one fewer: what streams add to a step, over what they may."""
    pure = [t for t in tokens if t[2].role is Role.TOKEN and not t[3].lent]
    kept = (len(pure) - 1) / len(pure) if pure else 0.0
    spare = []
    for step, _, machine, load in pure:
        fixed = load.prices.profile.decode.fixed_seconds if load.prices else 0.0
        if step - fixed <= kept * (most_seconds - fixed):
            spare.append((machine, load))
    return spare


def whole_seconds(prices: MachinePrices, load: Load, prompt_tokens: int, cached_tokens: int, targets: Targets) -> float:
    """A prompt computed beside the streams of a machine, in chunks that keep their steps within the target."""
    return prices.prefill_seconds(
        prompt_tokens,
        cached_tokens,
        step_tokens=_chunk(prices, load, targets),
        decodes=load.streams,
        kv_tokens=load.context_tokens,
    )


def turn_seconds(prices: MachinePrices, load: Load, tokens: int, now: float, targets: Targets) -> float:
    """From now until a prompt of so many tokens has the machine for itself. The engine computes shorter ones first,
    beside a part of the one that came first."""
    wait = max(0.0, load.free_at - now)
    if not wait or not load.waiting or tokens >= load.waiting[-1][0]:
        return wait
    shorter, pairs = 0, 0.0
    for waiting, with_others in load.waiting:
        if waiting > tokens:
            break
        shorter += waiting
        pairs += with_others
    before = prices.queue_seconds(
        shorter,
        pairs,
        step_tokens=_chunk(prices, load, targets),
        decodes=load.streams,
        kv_tokens=load.context_tokens,
    )
    return min(wait, before / (1 - _SHARE_OF_FIRST))


def _chunk(prices: MachinePrices, load: Load, targets: Targets) -> int:
    chunk = prices.step_tokens
    if load.streams and targets.tbt_seconds < float("inf"):
        chunk = prices.chunk_within(targets.tbt_seconds, load.streams, load.context_tokens)
    return chunk if load.prefill_bound is None else min(chunk, load.prefill_bound)


def _whole_end(request: RoutingRequest, machine: Machine, load: Load, now: float, targets: Targets) -> float:
    assert load.prices is not None
    cached = request.cached_tokens.get(machine.uid, 0)
    return max(now, load.free_at) + whole_seconds(load.prices, load, request.prompt_tokens, cached, targets)


def _best_whole(
    request: RoutingRequest,
    candidates: Sequence[tuple[Machine, Load]],
    now: float,
    targets: Targets,
    needs_room: bool = True,
) -> tuple[float, str, Machine] | None:
    """Of machines that would do both phases: which ends this prompt first, if its streams leave room for a chunk."""
    best: tuple[float, str, Machine] | None = None
    most = request.prompt_tokens + request.output_tokens
    for machine, load in candidates:
        prices = load.prices
        free_at = load.free_at if load.free_at > now else now
        if prices is None or (best is not None and free_at >= best[0]):
            continue
        if needs_room and not _has_room(prices, load, most, targets):
            continue
        end = _whole_end(request, machine, load, now, targets)
        if best is None or (end, machine.uid) < (best[0], best[1]):
            best = (end, machine.uid, machine)
    return best


def _has_room(prices: MachinePrices, load: Load, tokens: float, targets: Targets) -> bool:
    """For a stream that comes to so many tokens, and until then for its chunks."""
    if load.kv_free_tokens < tokens:
        return False
    if not load.streams:
        return True
    step = prices.profile.mixed.seconds(load.streams + 1 + prices.tile_tokens, load.context_tokens + tokens)
    return step * STEP_MARGIN <= targets.tbt_seconds

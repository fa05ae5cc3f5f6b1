"""BlitzScale's planner: a band of sizes for each pool, the middle of it at once upwards, one at a time downwards.

Zhang et al., BlitzScale, OSDI '25; blitz-serving/blitz-scale @594e911 (Apache-2.0), `generate_scale_target` and the
bounds of its configurations. Machines that it would stop or start are the spare ones of the other pool here; what it is
made for, loading weights over the network, costs nothing: all weights are there. It divides in single precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.profile import Profiles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Router, Setting
from poolwright_protocol.roles import Role

BLOCK_TOKENS = 64
LOOP_SECONDS = 0.1
DOWN_AFTER_SECONDS = 0.333
MOST_USE, LEAST_USE = 0.7, 0.5  # of a machine's prompt rate


@dataclass(frozen=True, slots=True)
class Bounds:
    """Uses between which a pool's size is right: of a machine's prompt rate, of its KV blocks, of its KV intake."""

    prompt: tuple[float, float] = (MOST_USE, LEAST_USE)
    memory: tuple[float, float] = (0.95, 0.75)
    transfer: tuple[float, float] = (0.8, 0.4)


@dataclass(frozen=True, slots=True)
class Load:
    """`waiting_tokens`: of prompts not begun; `blocks`: KV blocks in use everywhere, of them `prompt_blocks` on prompt
    machines; `intake`: tokens a second that all token machines take over; the others are of one machine."""

    prompt_blocks: int
    blocks: int
    waiting_tokens: int
    intake: int
    machine_blocks: int
    machine_prompt_rate: int


def changes(prompt: int, token: int, load: Load, bounds: Bounds = Bounds()) -> tuple[int, int]:
    """By how much each pool is to change."""
    prompt_tokens = load.prompt_blocks * BLOCK_TOKENS
    least_kv, most_kv = (_machines(prompt_tokens, use, load.intake) for use in bounds.transfer)
    least_token = max(_machines(load.blocks, bounds.memory[0], load.machine_blocks), least_kv)
    most_token = max(_machines(load.blocks, bounds.memory[1], load.machine_blocks), most_kv, least_token)
    least_rate, most_rate = (_machines(load.waiting_tokens, use, load.machine_prompt_rate) for use in bounds.prompt)
    least_prompt = max(least_rate, least_kv)
    return _change(prompt, least_prompt, max(most_rate, least_prompt)), _change(token, least_token, most_token)


def _machines(work: int, use: float, of_one: int) -> int:
    single = np.float32
    return int(np.ceil(single(work) / single(use) / single(of_one)))


def _change(current: int, least: int, most: int) -> int:
    if least > current:
        return (least + most + 1) // 2 - current
    return max(-1, 1 - current) if most < current else 0


class BlitzScaleRun:
    """The scaler of one run. A pool shrinks after it was too large for a while without a break."""

    period_seconds = LOOP_SECONDS

    def __init__(
        self,
        setting: Setting,
        router: Router,
        bounds: Bounds = Bounds(),
        down_after_seconds: float = DOWN_AFTER_SECONDS,
    ) -> None:
        self.router = router
        self._bounds, self._down_after = bounds, down_after_seconds
        model = setting.machines[0]
        rate = Profiles(setting).first.prompt_tokens_per_second(max(1.0, setting.expected_prompt_tokens))
        self._prompt_rate = max(1, int(rate))
        self._blocks = max(1, model.kv_capacity_tokens // BLOCK_TOKENS)
        self._intake = max(1, int(setting.network_bytes_per_second / model.kv_bytes_per_token))
        self._large_since: dict[Role, float] = {}

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        prompts = [m for m in view.machines if m.role is Role.PROMPT]
        tokens = [m for m in view.machines if m.role is Role.TOKEN]
        if not prompts or not tokens:
            return []
        held = sum(m.kv_used_tokens for m in prompts)
        load = Load(
            held // BLOCK_TOKENS,
            (held + sum(m.kv_used_tokens for m in tokens)) // BLOCK_TOKENS,
            sum(m.waiting_tokens for m in view.machines),
            self._intake * len(tokens),
            self._blocks,
            self._prompt_rate,
        )
        wanted = changes(len(prompts), len(tokens), load, self._bounds)
        prompt = len(prompts) + self._allowed(Role.PROMPT, now, wanted[0])
        token = len(tokens) + self._allowed(Role.TOKEN, now, wanted[1])
        want = fitted(prompt_count(view), prompt, token, len(view.machines))
        return moves_to(view, want, "planner", lambda m: m.kv_used_tokens)

    def _allowed(self, role: Role, now: float, change: int) -> int:
        if change >= 0:
            self._large_since.pop(role, None)
            return change
        since = self._large_since.setdefault(role, now)
        return change if now - since >= self._down_after else 0


def blitzscale(
    prompt: int,
    router: MakeRouter = ShortestQueue,
    most_use: float = MOST_USE,
    down_after_seconds: float = DOWN_AFTER_SECONDS,
) -> Policy:
    """`prompt`: machines of the prompt pool at the start. `most_use`: the upper bound of the prompt pool's band, whose
    lower one keeps its ratio to it."""
    bounds = Bounds(prompt=(most_use, most_use * LEAST_USE / MOST_USE))
    runs = PerRun(lambda setting: BlitzScaleRun(setting, router(setting), bounds, down_after_seconds))
    return Policy(
        name="BlitzScale",
        source="BlitzScale, OSDI '25; blitz-serving/blitz-scale @594e911, Apache-2.0",
        router=lambda setting: runs.router(setting).router,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"loop_seconds": LOOP_SECONDS, "down_after_seconds": down_after_seconds, "most_use": most_use},
    )

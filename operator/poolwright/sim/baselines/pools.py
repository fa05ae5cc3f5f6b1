"""Pool sizes on a fixed number of machines: what to do with wishes that do not add up, and whom to move."""

from collections.abc import Callable, Sequence

from poolwright.sim.policy import ClusterView, MachineView, RoleChange, Setting
from poolwright_protocol.roles import Role


def capped(prompt: float, token: float, machines: int) -> int:
    """Prompt machines where both wishes exceed the budget: shares in proportion, one of each at least."""
    return max(1, min(machines - 1, round(machines * prompt / (prompt + token))))


def fitted(current_prompt: int, prompt: int, token: int, machines: int) -> int:
    """Prompt machines after wishes for `prompt` and `token`: in proportion if they exceed the budget; else each pool
    gets its wish and machines that nobody wants stay where they are, since they cannot be given back."""
    prompt, token = max(1, prompt), max(1, token)
    if prompt + token > machines:
        return capped(prompt, token, machines)
    return max(prompt, min(machines - token, current_prompt))


def held(machine: MachineView) -> int:
    """Requests that a move would catch."""
    return len(machine.waiting_prompts) + machine.decodes + machine.bound_decodes


def settled(view: ClusterView) -> list[MachineView]:
    return [m for m in view.machines if m.ready and m.moving_to is None]


def prompt_count(view: ClusterView) -> int:
    """Prompt machines, those on their way to it included."""
    return sum((m.moving_to or m.role) is Role.PROMPT for m in view.machines)


def moves_to(
    view: ClusterView, prompt: int, reason: str, cost: Callable[[MachineView], float] = held
) -> list[RoleChange]:
    """Role changes until `prompt` machines compute prompts, the cheapest to move first; never the last of a pool."""
    current = prompt_count(view)
    target, source = (Role.PROMPT, Role.TOKEN) if prompt > current else (Role.TOKEN, Role.PROMPT)
    pool = sorted((m for m in settled(view) if m.role is source), key=cost)
    count = min(abs(prompt - current), len(pool) - 1)
    return [RoleChange(m.uid, target, reason) for m in pool[: max(0, count)]]


def split_roles(setting: Setting, prompt: int, mixed: int = 0) -> Sequence[Role]:
    """The first machines compute prompts, the next `mixed` do both, the rest decode; one machine alone does both."""
    machines = len(setting.machines)
    if machines == 1:
        return [Role.MIXED]
    token = machines - prompt - mixed
    return [Role.PROMPT] * prompt + [Role.MIXED] * mixed + [Role.TOKEN] * token

"""Policies by name, as the command line and the schedule name them, set up for the world of a cell.

    ours                        Poolwright's own; ours:moves=off,interval_seconds=30 with options (sim.ours.Options),
                                ours:without=packing for parts that no option switches off (bench.policy.parts)
    ours-as-shipped             with no more than what a pool runs as it is installed; ours-as-shipped-by-work the same
                                with `rebalance.basis: Work`
    held:2/5/1                  Poolwright's router and engines with 2 prompt, 5 token and 1 mixed machine for good
    static:2/5/1                the same split with the router and the engines that baselines have
    dynamo, narwhal, …          the published ones (sim.baselines.catalog), where a source has no router with
                                Poolwright's; options: sarathi:budget=512, keda:router=queue (the baselines' own), and
                                for those with pools prompt=3 for their first split
    …+predicted, …+early        behind Mooncake's early rejection

Runs nothing. Every policy with pools starts with the split that the mean load suggests, unless the cell says otherwise.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from bench.policy.cells import Cell, World, model_of
from bench.policy.parts import changes_of

from poolwright.sim.baselines.admission import Admission, with_admission
from poolwright.sim.baselines.arrow import Thresholds, arrow
from poolwright.sim.baselines.blitzscale import blitzscale
from poolwright.sim.baselines.catalog import baselines
from poolwright.sim.baselines.distserve import Parallelism, distserve, placement
from poolwright.sim.baselines.dopd import dopd
from poolwright.sim.baselines.dynamo import Loops, Target, dynamo
from poolwright.sim.baselines.dynamo_sla import dynamo_sla
from poolwright.sim.baselines.heteroscale import heteroscale
from poolwright.sim.baselines.hpa import hpa
from poolwright.sim.baselines.keda import keda
from poolwright.sim.baselines.narwhal import Knobs, narwhal
from poolwright.sim.baselines.one_pool import orca, sarathi, static_batching, vllm_v1
from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import in_blocks
from poolwright.sim.baselines.static_split import static_split
from poolwright.sim.baselines.tokenscale import tokenscale
from poolwright.sim.baselines.xllm import xllm
from poolwright.sim.ours import AS_SHIPPED, AS_SHIPPED_BY_WORK, Options, our_router, ours
from poolwright.sim.policy import Policy, Setting
from poolwright.sim.step_time import MachineModel

OURS = "ours"
# What a pool runs as it is installed, and the same with prices of work deciding.
SHIPPED: Mapping[str, Options] = {"ours-as-shipped": AS_SHIPPED, "ours-as-shipped-by-work": AS_SHIPPED_BY_WORK}
STATIC, HELD = "static", "held"
ADMISSIONS = {"early": Admission.EARLY, "predicted": Admission.PREDICTED}
PUBLISHED = tuple(baselines(1))
WITHOUT_POOLS = ("sarathi", "vllm", "orca", "static-batching")
# They read a TTFT target that grows with the prompt; the others are told that of the mean prompt.
READS_GROWING_TARGET = (OURS, *SHIPPED, STATIC, HELD, "tokenscale", "distserve")
# Their sources say nothing of routing.
OUR_ROUTER = (
    *("dynamo", "dynamo-throughput", "dynamo-latency", "dynamo-2025"),
    *("keda", "hpa", "heteroscale", "dopd", "blitzscale"),
)
QUEUE = "queue"
WITHOUT = "without"
BY_PHASE, SAME = "phase", "same"

Value = float | int | bool | str
Options_ = Mapping[str, Value]


def parts(name: str) -> tuple[str, dict[str, str], str | None]:
    """Of the name: the policy, its options as they are written, the admission. Raises ValueError."""
    plain, plus, admission = name.partition("+")
    base, _, rest = plain.partition(":")
    if plus and admission not in ADMISSIONS:
        raise ValueError(f"{name}: there is no admission {admission!r} among {', '.join(ADMISSIONS)}")
    if base in (STATIC, HELD):
        return base, {"split": rest}, admission or None
    if base not in (OURS, *SHIPPED, *PUBLISHED):
        known = ", ".join((OURS, *SHIPPED, f"{HELD}:P/T/M", f"{STATIC}:P/T/M", *PUBLISHED))
        raise ValueError(f"there is no policy {base!r} among {known}")
    options = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{name}: options are written key=value, not {pair!r}")
        options[key] = value
    return base, options, admission or None


def uses_ours(name: str) -> bool:
    """Whether some of Poolwright's own policy runs in it."""
    base, options, _ = parts(name)
    return base in (OURS, HELD, *SHIPPED) or (base in OUR_ROUTER and options.get("router") != QUEUE)


def part_left_out(name: str) -> str | None:
    return parts(name)[1].get(WITHOUT)


def is_split(name: str) -> bool:
    return parts(name)[0] in (STATIC, HELD)


def split_of(name: str, cell: Cell) -> tuple[int, int, int]:
    """Prompt, token and mixed machines of a static split. Raises ValueError."""
    written = parts(name)[1].get("split", "").split("/")
    try:
        prompt, token, mixed = (int(number) for number in (*written, *["0"] * (3 - len(written))))
    except ValueError:
        raise ValueError(f"{name}: a split is written {parts(name)[0]}:PROMPT/TOKEN/MIXED") from None
    if min(prompt, token, mixed) < 0 or prompt + token + mixed != cell.machines:
        raise ValueError(f"{name}: {cell.name} has {cell.machines} machines")
    if not mixed and not (prompt and token):
        raise ValueError(f"{name}: nobody would compute {'answers' if prompt else 'prompts'}")
    return prompt, token, mixed


def splits(cell: Cell, prompts: Sequence[int], mixed: int, base: str = HELD) -> Iterator[str]:
    """Those that exist."""
    for prompt in prompts:
        token = cell.machines - prompt - mixed
        if prompt >= 0 and token >= 0 and (mixed or (prompt and token)):
            yield f"{base}:{prompt}/{token}/{mixed}"


def policy_of(name: str, world: World) -> tuple[Policy, Setting]:
    """And what it is told. Raises ValueError."""
    base, written, admission = parts(name)
    policy: Policy
    if base == STATIC:
        policy = static_split(*split_of(name, world.cell))
    elif base == HELD:
        prompt_, _, mixed = split_of(name, world.cell)
        policy = ours(_of_router(world.cell), name)
        policy = replace(policy, first_roles=lambda setting: split_roles(setting, prompt_, mixed))
    elif base in (OURS, *SHIPPED):
        policy = ours(_for_cell(name, world.cell), name)
        if (start := world.cell.start) is not None:
            policy = replace(policy, first_roles=lambda setting: split_roles(setting, start))
    else:
        policy = _published(name, base, {key: _value(value) for key, value in written.items()}, world)
    told = world.setting if base in READS_GROWING_TARGET else world.told
    policy = in_blocks(policy, world.cell.block_tokens)
    if admission is not None:
        policy = with_admission(policy, ADMISSIONS[admission])
    return policy, told


def _for_cell(name: str, cell: Cell) -> Options:
    """Splitwise's nine percentiles hold nearly all requests to a limit: whoever promises them relegates nobody."""
    options = our_options(name)
    return replace(options, relegate=False) if cell.nine and "relegate" not in parts(name)[1] else options


def _of_router(cell: Cell) -> Options:
    return Options(moves=False, relegate=not cell.nine)


def our_options(name: str) -> Options:
    """Raises ValueError."""
    base = parts(name)[0]
    if base in SHIPPED:
        if parts(name)[1]:
            raise ValueError(f"{name}: {base} is as it is")
        return SHIPPED[base]
    kinds = typing.get_type_hints(Options)
    chosen: dict[str, typing.Any] = {}
    for key, text in parts(name)[1].items():
        if key == WITHOUT:
            changes_of(text)
            continue
        if key not in kinds:
            raise ValueError(f"{name}: ours has no option {key!r} among {', '.join(kinds)}")
        chosen[key] = _typed(name, key, text, kinds[key])
    return Options(**chosen)


def _typed(name: str, key: str, text: str, kind: typing.Any) -> object:
    if isinstance(kind, type) and issubclass(kind, Enum):
        for member in kind:
            if text in (member.name.lower(), str(member.value)):
                return member
        raise ValueError(f"{name}: {key} is one of {', '.join(m.name.lower() for m in kind)}")
    value = _value(text)
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif value is None:
        if type(None) in kinds:
            return None
    elif isinstance(value, int | float) and float in kinds:
        return float(value)
    elif isinstance(value, int) and int in kinds:
        return value
    raise ValueError(f"{name}: {text!r} is no value of {key}")


def _value(text: str) -> Value | None:
    words: dict[str, bool | None] = {"on": True, "true": True, "off": False, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _published(name: str, base: str, options: dict[str, Value | None], world: World) -> Policy:
    prompt = options.pop("prompt", world.prompt)
    if not isinstance(prompt, int):
        raise ValueError(f"{name}: prompt is a number of machines")
    router: MakeRouter = ShortestQueue
    if base in OUR_ROUTER:
        named = options.pop("router", OURS)
        if named not in (OURS, QUEUE):
            raise ValueError(f"{name}: router is {OURS} or {QUEUE}")
        if named == OURS:
            router = our_router(_of_router(world.cell))
    if base == "distserve":
        if options.pop("parallelism", BY_PHASE) not in (BY_PHASE, SAME):
            raise ValueError(f"{name}: parallelism is {BY_PHASE} or {SAME}")
        machines = world.setting.machines
        if machines[0] is not machines[-1]:  # placed by phase
            prompt = sum(model is machines[0] for model in machines)
            return distserve(prompt)
        return distserve(prompt if "prompt" in parts(name)[1] else None)
    if not options:
        return baselines(prompt, router)[base]()
    given = typing.cast(typing.Any, options)
    tunable: Mapping[str, Callable[[], Policy]] = {
        "sarathi": lambda: sarathi(**given),
        "vllm": lambda: vllm_v1(**given),
        "orca": lambda: orca(**given),
        "static-batching": lambda: static_batching(**given),
        "arrow": lambda: arrow(prompt, Thresholds(**given)),
        "xllm": lambda: xllm(prompt, **given),
        "xllm-as-published": lambda: xllm(prompt, as_published=True, **given),
        "narwhal": lambda: narwhal(prompt, Knobs(**given)),
        "dynamo": lambda: dynamo(prompt, router=router, loops=Loops(**given)),
        "dynamo-throughput": lambda: dynamo(prompt, Target.THROUGHPUT, router=router, loops=Loops(**given)),
        "dynamo-latency": lambda: dynamo(prompt, Target.LATENCY, router=router, loops=Loops(**given)),
        "dynamo-2025": lambda: dynamo_sla(prompt, router=router, **given),
        "keda": lambda: keda(prompt, router, **given),
        "hpa": lambda: hpa(prompt, router, **given),
        "tokenscale": lambda: tokenscale(prompt, **given),
        "heteroscale": lambda: heteroscale(prompt, router, **given),
        "dopd": lambda: dopd(prompt, router, **given),
        "blitzscale": lambda: blitzscale(prompt, router, **given),
    }
    if base not in tunable:
        raise ValueError(f"{name}: of the published ones, only {', '.join(tunable)} take options other than prompt")
    try:
        return tunable[base]()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


# DistServe's machines.


def own_world(name: str, world: World) -> World:
    """The world with a policy's own machines, of the same GPUs in all: DistServe chooses the parallelism of each phase,
    among those that a table exists of. Every other policy has the cell's."""
    base, written, _ = parts(name)
    if base != "distserve" or written.get("parallelism", BY_PHASE) != BY_PHASE or "prompt" in written:
        return world
    models = parallelisms(world.cell.machine)
    gpus = world.cell.machines * model_of(world.cell.machine).gpus
    found = placement(models, gpus, world.told) if len(models) > 1 else None
    if found is None or found.prompt == found.token:
        return world
    machines = [models[found.prompt]] * found.prompt_instances + [models[found.token]] * found.token_instances
    losses = [replace(loss, machine=min(loss.machine, len(machines) - 1)) for loss in world.conditions.losses]
    return replace(
        world,
        setting=replace(world.setting, machines=machines),
        conditions=replace(world.conditions, models=machines, losses=losses),
    )


def parallelisms(machine: str) -> dict[Parallelism, MachineModel]:
    """The same model on the same GPU, by how many of them one machine has."""
    stem, _, _ = machine.rpartition("-tp")
    found = {}
    for degree in (1, 2, 4, 8):
        try:
            found[Parallelism(degree, 1)] = model_of(f"{stem}-tp{degree}")
        except KeyError:
            continue  # there is no such table
    return found


def machines_text(world: World) -> str:
    """Of a world whose machines are not the cell's."""
    machines = world.setting.machines
    if machines[0] is machines[-1]:
        return ""
    prompt = sum(model is machines[0] for model in machines)
    return f"{prompt} x {machines[0].name} for prompts, {len(machines) - prompt} x {machines[-1].name} for answers"

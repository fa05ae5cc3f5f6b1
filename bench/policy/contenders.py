"""Policies by name, as the command line and the schedule name them, set up for the world of a cell.

    ours                        Poolwright's own; ours:moves=off,interval_seconds=30 with options (sim.ours.Options)
    static:2/5/1                2 prompt, 5 token and 1 mixed machine for good
    dynamo, narwhal, …          the published ones (sim.baselines.catalog); some take options: sarathi:budget=512,
                                and those with pools prompt=3 for their first split
    …+predicted, …+early        behind Mooncake's early rejection

Runs nothing. Every policy with pools starts with the split that the mean load suggests, unless the cell says otherwise.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from bench.policy.cells import Cell, World

from poolwright.sim.baselines.admission import Admission, with_admission
from poolwright.sim.baselines.arrow import Thresholds, arrow
from poolwright.sim.baselines.catalog import baselines
from poolwright.sim.baselines.dynamo import Loops, dynamo
from poolwright.sim.baselines.narwhal import Knobs, narwhal
from poolwright.sim.baselines.one_pool import orca, sarathi, static_batching
from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.static_split import static_split
from poolwright.sim.ours import Options, ours
from poolwright.sim.policy import Policy, Setting

OURS = "ours"
STATIC = "static"
ADMISSIONS = {"early": Admission.EARLY, "predicted": Admission.PREDICTED}
PUBLISHED = tuple(baselines(1))
WITHOUT_POOLS = ("sarathi", "vllm", "orca", "static-batching")
# They read a TTFT target that grows with the prompt; the others are told that of the mean prompt.
READS_GROWING_TARGET = (OURS, STATIC, "tokenscale", "distserve")

Value = float | int | bool | str
Options_ = Mapping[str, Value]


def parts(name: str) -> tuple[str, dict[str, str], str | None]:
    """Of the name: the policy, its options as they are written, the admission. Raises ValueError."""
    plain, plus, admission = name.partition("+")
    base, _, rest = plain.partition(":")
    if plus and admission not in ADMISSIONS:
        raise ValueError(f"{name}: there is no admission {admission!r} among {', '.join(ADMISSIONS)}")
    if base == STATIC:
        return base, {"split": rest}, admission or None
    if base not in (OURS, *PUBLISHED):
        known = ", ".join((OURS, f"{STATIC}:P/T/M", *PUBLISHED))
        raise ValueError(f"there is no policy {base!r} among {known}")
    options = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{name}: options are written key=value, not {pair!r}")
        options[key] = value
    return base, options, admission or None


def is_ours(name: str) -> bool:
    return parts(name)[0] == OURS


def split_of(name: str, cell: Cell) -> tuple[int, int, int]:
    """Prompt, token and mixed machines of a static split. Raises ValueError."""
    written = parts(name)[1].get("split", "").split("/")
    try:
        prompt, token, mixed = (int(number) for number in (*written, *["0"] * (3 - len(written))))
    except ValueError:
        raise ValueError(f"{name}: a split is written static:PROMPT/TOKEN/MIXED") from None
    if min(prompt, token, mixed) < 0 or prompt + token + mixed != cell.machines:
        raise ValueError(f"{name}: {cell.name} has {cell.machines} machines")
    if not mixed and not (prompt and token):
        raise ValueError(f"{name}: nobody would compute {'answers' if prompt else 'prompts'}")
    return prompt, token, mixed


def splits(cell: Cell, prompts: Sequence[int], mixed: int) -> Iterator[str]:
    """Those that exist."""
    for prompt in prompts:
        token = cell.machines - prompt - mixed
        if prompt >= 0 and token >= 0 and (mixed or (prompt and token)):
            yield f"{STATIC}:{prompt}/{token}/{mixed}"


def policy_of(name: str, world: World) -> tuple[Policy, Setting]:
    """And what it is told. Raises ValueError."""
    base, written, admission = parts(name)
    policy: Policy
    if base == STATIC:
        policy = static_split(*split_of(name, world.cell))
    elif base == OURS:
        policy = ours(_for_cell(name, world.cell), name)
        if (start := world.cell.start) is not None:
            policy = replace(policy, first_roles=lambda setting: split_roles(setting, start))
    else:
        policy = _published(name, base, {key: _value(value) for key, value in written.items()}, world.prompt)
    told = world.setting if base in READS_GROWING_TARGET else world.told
    if admission is not None:
        policy = with_admission(policy, ADMISSIONS[admission])
    return policy, told


def _for_cell(name: str, cell: Cell) -> Options:
    """Splitwise's nine percentiles hold nearly all requests to a limit: whoever promises them relegates nobody."""
    options = our_options(name)
    return replace(options, relegate=False) if cell.nine and "relegate" not in parts(name)[1] else options


def our_options(name: str) -> Options:
    """Raises ValueError."""
    kinds = typing.get_type_hints(Options)
    chosen: dict[str, typing.Any] = {}
    for key, text in parts(name)[1].items():
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


def _published(name: str, base: str, options: dict[str, Value | None], suggested: int) -> Policy:
    prompt = options.pop("prompt", suggested)
    if not isinstance(prompt, int):
        raise ValueError(f"{name}: prompt is a number of machines")
    if not options:
        return baselines(prompt)[base]()
    given = typing.cast(typing.Any, options)
    tunable: Mapping[str, Callable[[], Policy]] = {
        "sarathi": lambda: sarathi(**given),
        "orca": lambda: orca(**given),
        "static-batching": lambda: static_batching(**given),
        "arrow": lambda: arrow(prompt, Thresholds(**given)),
        "narwhal": lambda: narwhal(prompt, Knobs(**given)),
        "dynamo": lambda: dynamo(prompt, loops=Loops(**given)),
    }
    if base not in tunable:
        raise ValueError(f"{name}: of the published ones, only {', '.join(tunable)} take options other than prompt")
    try:
        return tunable[base]()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None

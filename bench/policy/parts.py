"""Parts of Poolwright's policy that no option switches off, and how each is: by the value of a constant, for one run.

For ablations alone. A part that `core` does not have under that name any more is refused, not passed over.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Change = tuple[str, str, Any]


def _nobody(*_: Any) -> list[Any]:
    return []


_CORE = "poolwright.core"
PARTS: Mapping[str, Sequence[Change]] = {
    # Whether the giver of a machine would hold its own without it.
    "donor-test": (
        (f"{_CORE}.fast_loop", "HOLDS", float("inf")),
        (f"{_CORE}.latency_plan", "COMFORTABLE_STRESS", float("inf")),
        (f"{_CORE}.latency_plan", "MOST_BUSY_SHARE", float("inf")),
    ),
    # Two plans that agree, and three looks.
    "confirmation": ((f"{_CORE}.work_plan", "OVERLOAD", 0.0), (f"{_CORE}.fast_loop", "TICKS", 1)),
    "deadband": ((f"{_CORE}.work_plan", "DEADBAND", 0.0),),
    "hold-after-miss": ((f"{_CORE}.plan", "HELD_INTERVALS", 0),),
    "cool-down": ((f"{_CORE}.fast_loop", "PROMPT_COOL_DOWN_SECONDS", 0.0),),
    # Streams go where a step is shortest; a mixed machine's step is not taken to be full either.
    "packing": ((f"{_CORE}.priced_routing", "STEP_MARGIN", float("inf")),),
    # Token machines are lent to no prompt.
    "lending": ((f"{_CORE}.priced_routing", "_to_spare", _nobody), (f"{_CORE}.priced_routing", "_lendable", _nobody)),
}


@contextmanager
def without(part: str | None) -> Iterator[None]:
    """Raises ValueError."""
    changes = [] if part is None else changes_of(part)
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def changes_of(part: str) -> list[tuple[Any, str, Any]]:
    """Raises ValueError."""
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r} among {', '.join(PARTS)}")
    found = []
    for module_name, name, value in PARTS[part]:
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            raise ValueError(f"{module_name} has no {name}, by which {part} is switched off")
        found.append((module, name, value))
    return found

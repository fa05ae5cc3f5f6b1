"""The operations in `torch.library`, under `poolwright::`, and who runs one.

On CUDA the Triton kernel; on a CPU what the engine registered for that operation, else the reference. Meta and fake
tensors get shapes only, so `torch.compile` traces over an operation as over any other. Operations are for inference:
none has a derivative.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

NAMESPACE = "poolwright"

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # lives as long as the process: operations vanish with it
_references: dict[str, Callable[..., Any]] = {}
_cpu: dict[str, Callable[..., Any]] = {}


def operation(
    name: str,
    *,
    reference: Callable[P, R],
    cuda: Callable[P, R],
    fake: Callable[P, R],
    mutates: Sequence[str] = (),
) -> Callable[P, R]:
    """Defines `poolwright::name` with the reference's signature, and returns it. `mutates` names the arguments that are
    written; `fake` makes the result's shapes and touches no data."""
    _library.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    _references[name] = reference

    def on_cpu(*args: P.args, **options: P.kwargs) -> R:
        return cast(R, _cpu.get(name, reference)(*args, **options))

    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload: Callable[P, R] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def register_cpu(name: str, function: Callable[..., Any]) -> None:
    """From now on `function` is what `poolwright::name` runs on a CPU. It has the reference's signature and results."""
    if name not in _references:
        raise KeyError(f"no operation {name}; there are {', '.join(sorted(_references))}")
    wanted, given = (list(inspect.signature(f).parameters) for f in (_references[name], function))
    if wanted != given:
        raise TypeError(f"{name} takes ({', '.join(wanted)}), the given function ({', '.join(given)})")
    _cpu[name] = function


def unregister_cpu(name: str) -> None:
    """Back to the reference."""
    _cpu.pop(name, None)


def operations() -> tuple[str, ...]:
    """Names of those defined so far: each is defined by the module that holds its kernel."""
    return tuple(sorted(_references))


def widened(x: Tensor) -> Tensor:
    """What references compute in: float32, or float64 where that came in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

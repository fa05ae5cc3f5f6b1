"""What one step of a machine takes: the protocol that every machine model of the simulator fulfils."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """`tokens` prompt tokens of one request, computed in one step after `start` tokens that are in its KV already."""

    start: int
    tokens: int


class StepTime(Protocol):
    """Times never fall when work is added. `name` says hardware, model and degree of parallelism."""

    @property
    def name(self) -> str: ...

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        """One step: prompt chunks, and `decodes` rows with `context_tokens` tokens of KV between them."""
        ...

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        """How many steps of decodes alone, each adding a token to every row, begin within `seconds` (at least one), at
        most `most_steps`, and how long they take in all: what summing `seconds()` gives, in closed form where it can
        be."""
        ...


class MachineModel(NamedTuple):
    """A kind of machine that holds one copy of the model. Costs of what the tables do not say are None.

    `pipeline_stages`: the layers are cut into so many equal stages, and so many batches are under way at once;
    `step_time` is then a step's way through all of them."""

    name: str
    step_time: StepTime
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    gpus: int = 1
    dollars_per_hour: float | None = None
    watts: float | None = None
    pipeline_stages: int = 1

"""A model as files hold it, whatever their format: its config, its tokenizer, and its tensors by Hugging Face name.

Owns what both formats share: the error, settings read as the type they must have, the account of what was read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.text.tokenizer import Tokenizer

_LARGEST = 2.0**53  # whole numbers are exact up to here, and no model has a larger one

Shape = tuple[int, ...]
Progress = Callable[[int, int], None]
"""Called with (bytes of tensors read so far, bytes in all)."""


class LoadError(Exception):
    """One line that says which path cannot be served and why."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


class TensorSource(ABC):
    """Tensors by the name that Hugging Face gives them. Nothing is held: each is copied to where it will stay."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """`sizes`: bytes of each tensor, by the name it has in the file."""
        self._path = path
        self._unread = dict(sizes)
        self._total_bytes = sum(sizes.values())
        self._done_bytes = 0
        self._progress: Progress | None = None

    def report_to(self, progress: Progress) -> None:
        self._progress = progress
        progress(0, self._total_bytes)

    def copy(self, name: str, target: Tensor) -> None:
        """Fill `target`, whose shape has passed `require`, and convert to its dtype."""
        stored = self._stored_name(name)
        self._copy(stored, target)
        self._done_bytes += self._unread.pop(stored, 0)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)

    def require(self, name: str, shape: Shape) -> None:
        """Raises LoadError unless there is such a tensor, of a dtype that can be read."""
        stored = self._stored_name(name)
        found = self._shape(stored)
        if found is None:
            raise LoadError(f"{self._path}: tensor {stored} is missing")
        if found != shape:
            raise LoadError(f"{self._path}: tensor {stored} has shape {found}, expected {shape}")

    def unread(self) -> Iterable[str]:
        """Names in the file of the tensors that nobody has asked for."""
        return self._unread.keys()

    @abstractmethod
    def _stored_name(self, name: str) -> str: ...

    @abstractmethod
    def _shape(self, stored: str) -> Shape | None:
        """None: there is no such tensor. Raises LoadError for a dtype that cannot be read."""

    @abstractmethod
    def _copy(self, stored: str, target: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`norm_offset` is added to the weights of norms: 1 where a file holds their distance from 1."""

    config: ModelConfig
    tokenizer: Tokenizer
    tensors: TensorSource
    norm_offset: float = 0.0


class Settings:
    """Named values of a file, each asked for as the type it must have."""

    def __init__(self, path: Path, where: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._where = where
        self._values = values

    def number(self, name: str, default: float | None = None) -> float:
        """`default` stands for an absent value and for null."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LoadError(f"{self._path}: {name} in {self._where} is missing or not a number")
        if not abs(value) <= _LARGEST:
            raise LoadError(f"{self._path}: {name} in {self._where} is {value!s:.20}, out of range")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise LoadError(f"{self._path}: {name} in {self._where} is {value}, not a whole number")
        return int(value)

    def optional(self, name: str) -> float | None:
        """None and 0 mean that there is none."""
        value = self._values.get(name)
        return self.number(name) if value else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise LoadError(f"{self._path}: {name} in {self._where} is not true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Empty where it is absent or null."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise LoadError(f"{self._path}: {name} in {self._where} is not an object")
        return value or {}

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise LoadError(f"{self._path}: {name} in {self._where} is missing or not text")
        return value

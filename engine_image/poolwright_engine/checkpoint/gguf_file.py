"""A GGUF file: its metadata and where each tensor lies, read from a mapping of it.

Owns the container format (versions 2 and 3, little-endian), and checks every length and offset against the file. What
the metadata and tensors mean is not known here. Strings of large vocabularies come at once, which is why the reader of
the `gguf` package is not used: it makes several array objects for each.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from poolwright_engine.checkpoint.checkpoint import LoadError, Shape, one_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_ROWS_AT_ONCE_BYTES = 1 << 24  # of values decoded in one go: bounds what is held besides the target


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` as PyTorch has it: the fastest index last. `data` is a window on the file, rows of bytes."""

    name: str
    shape: Shape
    kind: gguf.GGMLQuantizationType
    data: np.ndarray

    @property
    def is_readable(self) -> bool:
        _, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        try:
            gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), self.kind)
        except NotImplementedError:
            return False
        return True

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """A row's index and the float32 rows from there on, until all rows have come."""
        step = max(1, _ROWS_AT_ONCE_BYTES // (4 * self.shape[-1]))
        for first in range(0, len(self.data), step):
            values = gguf.quants.dequantize(self.data[first : first + step], self.kind)
            yield first, np.require(values, dtype=np.float32, requirements="W")

    def array(self) -> np.ndarray:
        """All of it as float32, writable."""
        values = gguf.quants.dequantize(self.data, self.kind)
        return np.require(values.reshape(self.shape), dtype=np.float32, requirements="W")


class GgufFile:
    def __init__(self, path: Path) -> None:
        """Raises LoadError with the path and what is wrong."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (ValueError, OverflowError, struct.error, UnicodeDecodeError) as error:
            raise LoadError(f"{path} is not a readable GGUF file: {one_line(error)}") from error

    def _read(self) -> None:
        if self.path.stat().st_size == 0:
            raise ValueError("it is empty")
        with self.path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(data)
        if cursor.bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version} (supported: 2 and 3, little-endian)")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_values):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("I"))
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        begin = -(-cursor.position // alignment) * alignment
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise ValueError(f"tensor {name} comes twice")
            self.tensors[name] = GgufTensor(name, shape, kind, _rows(data, name, shape, kind, begin + offset))

    def _tensor_info(self, cursor: "_Cursor") -> tuple[str, Shape, gguf.GGMLQuantizationType, int]:
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
        number = cursor.scalar("I")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(f"tensor {name} has type number {number}, which is unknown") from error
        return name, shape, kind, cursor.scalar("Q")


def _rows(data: mmap.mmap, name: str, shape: Shape, kind: gguf.GGMLQuantizationType, begin: int) -> np.ndarray:
    """The tensor's bytes, (rows, bytes of a row)."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] == 0 or shape[-1] % block:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} values in blocks of {block}")
    rows, row_bytes = prod(shape[:-1]), shape[-1] // block * block_bytes
    if begin + rows * row_bytes > len(data):
        raise ValueError(
            f"tensor {name} ends at byte {begin + rows * row_bytes}, the file at {len(data)}: it was cut short"
        )
    return np.frombuffer(data, dtype=np.uint8, count=rows * row_bytes, offset=begin).reshape(rows, row_bytes)


class _Cursor:
    """Little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.position = 0

    def bytes(self, count: int) -> bytes:
        begin = self.position
        if begin + count > self._size:
            raise ValueError(f"it ends in the middle of its header, at byte {self._size}")
        self.position = begin + count
        return self._data[begin : begin + count]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.bytes(8))
        return self.bytes(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        """An array becomes a list; one of numbers is read at once."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"it has a value of type number {kind}, which is unknown")
        of, count = self.scalar("I"), self.scalar("Q")
        if of in _SCALARS:
            code = np.dtype(_SCALARS[of]).newbyteorder("<")
            return np.frombuffer(self.bytes(count * code.itemsize), dtype=code).tolist()
        if of != _STRING:
            raise ValueError(f"it has an array of type number {of}, which is not supported")
        if self.position + 8 * count > self._size:
            raise ValueError(f"it ends in the middle of its header, at byte {self._size}")
        return [self.string() for _ in range(count)]

"""Products with weight matrices on a CPU: the forms of one product, and which of them this machine does fastest.

Owns how a weight lies in memory. Knows nothing of models: a list of products comes in, and each learns its forms.
"""

import ctypes
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.native.int8_product import MOST_INPUTS, Int8Product
from poolwright_engine.native.library import CpuOperations, is_native, level

log = logging.getLogger(__name__)

Product = Callable[["Linear", Tensor], Tensor]  # unbound: a bound one would keep its weight in a cycle
_Shape = tuple[int, int, torch.dtype]  # (out, in) of a weight, and what it is made of

ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 128, 512)
"""Products of up to so many input rows share a form, measured at the bound; the last form serves all beyond."""
_MEASURED_FIRST = (1, 128, 512, 8, 4, 16, 2, 32)  # on a slow machine time may end before the last ones
_BUCKET_OF_BITS = (0, 1, 2, 3, 4, 5, 6, 6)  # by the bit length of rows - 1
_PACKED_ROWS = 8  # that oneDNN is told to expect
_FULL_ROWS = 16  # what the widest vectors and tiles hold
_BLOCK_FEATURES = 32  # rows of a weight
_BLOCK_ROWS = range(2, 16)  # of x: one row is a product of a vector, and from 16 rows on other forms are as good
_LAST_BUCKET = len(ROW_BOUNDS) - 1

_PACKING_BUCKETS = 3  # few rows say nothing of many
_PACKING_GAIN = 0.97  # a packed layout must be at least this much faster on the whole: it takes time to make
_MOST_PARTS = 4  # of a model, measured in turn
_PART_WEIGHTS = 2**26  # of a part, at most about so many, as long as it has a product of each shape
_MOST_ROUNDS = 8
_SURE_ROUNDS = 3  # of a bucket, whatever time is left
_MANY_ROWS = 64  # from here on a product computes longer than it reads: three of each shape say what all do
_MANY_ROWS_PRODUCTS = 3
_SAMPLE_MULTIPLICATIONS = 2**32  # a bucket whose one product takes more is not measured
_TINY = 1e-12  # a scale of what is all zero
_FINE_STEPS = 254  # of one level: what rounding leaves out is at most half a level
_INT4_GROUP = 32
_INT4_FEW_ROWS = 64  # beyond it, unpacking once costs less than unpacking again and again
# With VNNI, oneDNN multiplies unsigned by signed bytes, and signed inputs cost a conversion in each call. Without, such
# products overflow 16 bits in pairs, which it prevents for signed inputs only.
_INT8_ZERO = 128 if torch.cpu._is_vnni_supported() else 0
_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


class Form(StrEnum):
    """Ways to the same sums in another order: results differ by rounding only."""

    ROWS = "rows"  # x Wᵀ from the weight as it is stored
    COLUMNS = "columns"  # (W xᵀ)ᵀ from the same: the result's columns are contiguous
    FILLED = "filled"  # the same with rows added up to a multiple of 16: kernels for fewer may be slower than full ones
    BLOCKS = "blocks"  # x with 32 rows of W at a time, as a batch: each block is read once, into a cache near the core
    PACKED = "packed"  # oneDNN, from a weight in its own order


AUTO = "auto"
FORMS = (AUTO, *Form)


class Linear:
    """x Wᵀ + b for an (out, in) weight. Two layouts, one at a time: as stored, or packed."""

    __slots__ = ("_packed", "_products", "_weight", "bias", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype: torch.dtype = weight.dtype
        self.bias = bias
        self._weight: Tensor | None = weight
        self._packed: Tensor | None = None
        self._products: tuple[Product, ...] = (Linear._rows,) * len(ROW_BOUNDS)

    def __call__(self, x: Tensor) -> Tensor:
        bits = (x.shape[0] - 1).bit_length()
        return self._products[_BUCKET_OF_BITS[bits] if bits < 8 else _LAST_BUCKET](self, x)

    def use(self, forms: Sequence[Form]) -> None:
        """One form for each bucket: all of them packed, or none. Packing lets go of the weight as it was stored."""
        if Form.PACKED in forms:
            self._packed = self._pack()
            self._weight = None
            self._products = (Linear._from_packed,) * len(ROW_BOUNDS)
        else:
            self._products = tuple(_STORED[form] for form in forms)

    def memory(self) -> tuple[int, int]:
        """Address and size in bytes of what every product reads."""
        if self._packed is not None:
            return int(torch.ops.mkldnn.data_ptr(self._packed)), int(torch.ops.mkldnn._nbytes(self._packed))
        return self.weight.data_ptr(), self.weight.nbytes

    @property
    def shape(self) -> _Shape:
        return self.out_features, self.in_features, self.dtype

    @property
    def size(self) -> int:
        """Multiplications of one row."""
        return int(self.out_features * self.in_features)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def weight(self) -> Tensor:
        """As it was stored. Gone once it is packed."""
        if self._weight is None:
            raise RuntimeError("the weight was packed")
        return self._weight

    def _pack(self) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_ROWS)
        return packed

    def _rows(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self.bias)

    def _columns(self, x: Tensor) -> Tensor:
        y = (self._weight @ x.t()).t()
        return y if self.bias is None else y.add_(self.bias)

    def _filled(self, x: Tensor) -> Tensor:
        y = _filled_product(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def _blocks(self, x: Tensor) -> Tensor:
        y = _block_product(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def _from_packed(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return _no_rows(x, self.out_features)
        return _packed_product(x, self._packed, self.bias)


_STORED: Mapping[Form, Product] = {
    Form.ROWS: Linear._rows,
    Form.COLUMNS: Linear._columns,
    Form.FILLED: Linear._filled,
    Form.BLOCKS: Linear._blocks,
}


class Int8Linear(Linear):
    """Weights of 8 bits, one scale for each output. The input is rounded too, one scale for each row, so a row's result
    does not depend on the rows beside it: to 8 bits, or `fine`, to 8 bits and what that left out to 8 more. Products
    are sums of integers, exact on every CPU."""

    __slots__ = ("_fine", "_scales", "_zeros")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, fine: bool = False) -> None:
        super().__init__(weight, bias)
        self._fine = fine
        levels, self._scales = _int8_levels(weight)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(levels, None)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return _no_rows(x, self.out_features)
        scales = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
        scaled = x / scales.clamp_min_(_TINY).div_(127)
        levels = scaled.round()
        if self._fine:
            levels = torch.cat((levels, scaled.sub_(levels).mul_(_FINE_STEPS).round_()))
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels.add_(_INT8_ZERO).to(torch.uint8) if _INT8_ZERO else levels.to(torch.int8),
            *(1.0, _INT8_ZERO),  # scale and zero of the input: scales are applied below
            *(self._packed, self._scales, self._zeros, None),
            *(1.0, 0, torch.float32),  # of the output
            *("none", [], ""),
        )
        if self._fine:
            y = y[:rows].add_(y[rows:], alpha=1 / _FINE_STEPS)
        y = y.mul_(scales).to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def use(self, forms: Sequence[Form]) -> None:
        """It has one form."""


class NativeInt8Linear(Linear):
    """The same integers and scales in one call instead of a dozen; the bias is added before the one rounding, and a row
    with an element that is not finite is all NaN. Raises NoLibrary."""

    __slots__ = ("_product",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None, fine: bool = False) -> None:
        super().__init__(weight, bias)
        levels, scales = _int8_levels(weight)
        self._product = Int8Product(levels, scales, bias, fine)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def is_packed(self) -> bool:
        return True

    def memory(self) -> tuple[int, int]:
        return self._product.packed.data_ptr(), self._product.packed.nbytes

    def use(self, forms: Sequence[Form]) -> None:
        """It has one form."""


class Int4Linear(Linear):
    """Weights of 4 bits in groups of 32 inputs, each with a scale and a middle value, as Q4_1 of llama.cpp has them;
    input and products in bfloat16. For machines where reading the weights is what a token costs.

    Held twice: in the order of PyTorch's kernel, which unpacks a weight again for every few rows, and by halves of a
    group in a byte, from which a product of many rows makes the weight in bfloat16 first.
    """

    __slots__ = ("_groups", "_halves", "_lowest", "_scales")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        grouped = weight.float().unflatten(1, (-1, _INT4_GROUP))
        low, high = grouped.aminmax(dim=2, keepdim=True)
        scales = ((high - low) / 15).clamp_min_(_TINY).bfloat16()
        middles = (low + 8 * scales.float()).bfloat16()
        levels = ((grouped - middles.float()) / scales.float()).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        self._groups = torch.cat((scales, middles), dim=2).transpose(0, 1).contiguous()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).int(), 1)
        first, second = levels.permute(1, 2, 0).chunk(2, dim=1)  # (groups, 16, out) each
        self._halves = (first | second << 4).contiguous()
        self._scales = scales.permute(1, 2, 0).contiguous()  # (groups, 1, out)
        self._lowest = (middles - 8 * scales).permute(1, 2, 0).contiguous()
        self._weight = None

    @staticmethod
    def takes(weight: Tensor) -> bool:
        out_features, in_features = weight.shape
        return bool(out_features % 16 == 0 and in_features % _INT4_GROUP == 0)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return _no_rows(x, self.out_features)
        narrow = x.bfloat16().contiguous()
        if rows > _INT4_FEW_ROWS:
            y = narrow @ self._unpacked()
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, self._packed, _INT4_GROUP, self._groups)
        y = y.to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def _unpacked(self) -> Tensor:
        """(in, out): scales then lie along what is contiguous."""
        weight = torch.empty(len(self._halves), _INT4_GROUP, self.out_features, dtype=torch.bfloat16)
        for levels, into in zip((self._halves & 15, self._halves >> 4), weight.chunk(2, dim=1), strict=True):
            torch.addcmul(self._lowest, levels.bfloat16(), self._scales, out=into)
        return weight.flatten(0, 1)

    def memory(self) -> tuple[int, int]:
        assert self._packed is not None
        return self._packed.data_ptr(), self._packed.nbytes

    def use(self, forms: Sequence[Form]) -> None:
        """It has one form."""


class Quantization(StrEnum):
    """Made from the weights as they are loaded, whatever they are stored as."""

    INT8 = "int8"  # inputs fine where a norm made them: some of its elements are many times the others
    INT4 = "int4"  # the head, which the choice between tokens hangs on, in 8 bits


def quantized(
    quantization: Quantization, operations: CpuOperations, name: str, weight: Tensor, bias: Tensor | None
) -> Linear:
    """`name` is the product's in the model, as in Hugging Face's files. Raises NoLibrary."""
    with torch.inference_mode():
        if quantization is Quantization.INT4 and name != "lm_head" and Int4Linear.takes(weight):
            return Int4Linear(weight, bias)
        fine = not name.endswith(("o_proj", "down_proj"))
        # Without vector instructions that the C knows, oneDNN's product is the faster one from a few rows on.
        if weight.shape[1] <= MOST_INPUTS and is_native(operations) and level() != "plain":
            return NativeInt8Linear(weight, bias, fine)
        return Int8Linear(weight, bias, fine)


def _int8_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 levels of ±127, and the scale of each output."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(_TINY).div_(127)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def _no_rows(x: Tensor, out_features: int) -> Tensor:
    return x.new_empty(0, out_features)


def _filled_product(x: Tensor, weight: Tensor) -> Tensor:
    rows, features = x.shape
    full = x.new_zeros(-(-rows // _FULL_ROWS) * _FULL_ROWS, features)
    full[:rows] = x
    product: Tensor = (weight @ full.t()).t()[:rows]
    return product


def _block_product(x: Tensor, weight: Tensor) -> Tensor:
    rows, blocks = x.shape[0], weight.shape[0] // _BLOCK_FEATURES
    if weight.shape[0] % _BLOCK_FEATURES or not rows:
        return F.linear(x, weight)
    of_blocks = weight.unflatten(0, (blocks, _BLOCK_FEATURES)).transpose(1, 2)
    return torch.bmm(x.expand(blocks, -1, -1), of_blocks).transpose(0, 1).reshape(rows, -1)


def _packed_product(x: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for all products of one shape. Microseconds a product; an unmeasured bucket has none."""

    out_features: int
    in_features: int
    forms: tuple[Form, ...]
    microseconds: tuple[dict[Form, float], ...]

    def __str__(self) -> str:
        parts = []
        for bound, form, times in zip(ROW_BOUNDS, self.forms, self.microseconds, strict=True):
            measured = ", ".join(f"{name} {micros:.0f}" for name, micros in times.items())
            parts.append(f"≤{bound}: {form}" + (f" ({measured} µs)" if measured else ""))
        return f"{self.out_features}×{self.in_features}: " + "; ".join(parts)


def choose_forms(products: Iterable[Linear], form: str = AUTO, limit_seconds: float = 3.0) -> tuple[Choice, ...]:
    """Settles, once, the form of every product: `form`, or the fastest by a measurement on the calling thread that
    takes about `limit_seconds`, and up to twice that where a comparison needs it. `products` are in the order in
    which a model makes them. Their weights are moved to huge pages as far as the system has any.

    The choice holds for the life of the process, so a token does not depend on when it was computed.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    given = list(products)
    free = [product for product in given if type(product) is Linear]
    use_huge_pages(product.memory() for product in given)
    choices = []
    with torch.inference_mode():
        measured = _measure(free, limit_seconds) if form == AUTO else {}
        for shape, group in _by_shape(free).items():
            times = measured.get(shape) or tuple({} for _ in ROW_BOUNDS)
            forms = fastest(times) if form == AUTO else (Form(form),) * len(ROW_BOUNDS)
            for product in group:
                product.use(forms)
            choices.append(Choice(*shape[:2], forms, times))
            log.debug("Product %s", choices[-1])
    give_back_freed_memory()
    use_huge_pages(product.memory() for product in free if product.is_packed)
    return tuple(choices)


def _by_shape(products: Iterable[Linear]) -> dict[_Shape, list[Linear]]:
    groups: dict[_Shape, list[Linear]] = {}
    for product in products:
        groups.setdefault(product.shape, []).append(product)
    return groups


def _measure(products: Sequence[Linear], limit_seconds: float) -> Mapping[_Shape, tuple[dict[Form, float], ...]]:
    """Microseconds of a product by shape, bucket and form; of a bucket that is not worth its time, none.

    As in a step, products of all shapes follow each other and each weight was not read for long: forms take turns over
    parts of the model that move on, and a form that is best on weights in a cache may be the slowest on others. Each
    product is timed by itself, and of all its times a form counts by the lower quartile: a product is shorter than the
    time that a scheduler gives to what else runs on the machine, so most of those are undisturbed.
    """
    if not products or limit_seconds <= 0:
        return {}
    groups = _by_shape(products)
    parts = _parts(products, groups)
    packed = {}
    if torch.backends.mkldnn.is_available():
        packed = {product: product._pack() for product in parts[0]}
    seen: dict[_Shape, list[dict[Form, list[float]]]] = {shape: [{} for _ in ROW_BOUNDS] for shape in groups}
    began = time.perf_counter()
    turns = itertools.cycle(parts)
    few = _few_of_each(parts[0])
    for place, rows in enumerate(_MEASURED_FIRST, start=1):
        deadline = began + limit_seconds * place / len(ROW_BOUNDS)
        bucket = ROW_BOUNDS.index(rows)
        forms = [Form.ROWS, Form.COLUMNS]
        forms += [Form.FILLED] if rows % _FULL_ROWS else []
        forms += [Form.BLOCKS] if rows in _BLOCK_ROWS else []
        forms += [Form.PACKED] if packed else []
        for count in range(_MOST_ROUNDS):
            late = time.perf_counter() - began > 2 * limit_seconds
            if late or (count >= _SURE_ROUNDS and time.perf_counter() > deadline):
                break
            for form in forms:
                part = next(turns) if form is not Form.PACKED else parts[0]
                for shape, micros in _microseconds(few if rows >= _MANY_ROWS else part, rows, form, packed):
                    if count:  # the first round makes what the others reuse
                        seen[shape][bucket].setdefault(form, []).append(micros)
    return {
        shape: tuple({form: sorted(times)[len(times) // 4] for form, times in b.items()} for b in buckets)
        for shape, buckets in seen.items()
    }


def _parts(products: Sequence[Linear], groups: Mapping[_Shape, Sequence[Linear]]) -> list[list[Linear]]:
    """The products cut into runs of a bounded size that each have all shapes; a product of a rare shape is in all."""
    size = sum(product.size for product in products)
    count = max(1, min(_MOST_PARTS, min((len(g) for g in groups.values() if len(g) > 1), default=1)))
    count = max(count, min(size // _PART_WEIGHTS, max(len(g) for g in groups.values())))
    parts: list[list[Linear]] = [[] for _ in range(count)]
    for group in groups.values():
        for index, part in enumerate(parts):
            first, stop = (len(group) * at // count for at in (index, index + 1))
            part.extend(group[first:stop] or group[first : first + 1])
    order = {product: index for index, product in enumerate(products)}
    return [sorted(part, key=order.__getitem__) for part in parts]


def _few_of_each(part: Sequence[Linear]) -> list[Linear]:
    counts: Counter[_Shape] = Counter()
    few = []
    for product in part:
        counts[product.shape] += 1
        if counts[product.shape] <= _MANY_ROWS_PRODUCTS:
            few.append(product)
    return few


def _microseconds(
    part: Sequence[Linear], rows: int, form: Form, packed: Mapping[Linear, Tensor]
) -> Iterator[tuple[_Shape, float]]:
    """Of each product that is not too large for so many rows."""
    inputs = {(p.in_features, p.dtype): torch.full((rows, p.in_features), 0.01, dtype=p.dtype) for p in part}
    for product in part:
        if rows * product.size > _SAMPLE_MULTIPLICATIONS:
            continue
        x = inputs[product.in_features, product.dtype]
        began = time.perf_counter()
        if form is Form.PACKED:
            _packed_product(x, packed[product], None)
        else:
            _STORED[form](product, x)
        yield product.shape, (time.perf_counter() - began) * 1e6


def fastest(times: Sequence[dict[Form, float]]) -> tuple[Form, ...]:
    """Packed for all buckets if that is faster on the geometric mean of enough of them; else the best of the others for
    each, and rows where nothing was measured."""
    measured = [of_bucket for of_bucket in times if of_bucket]
    stored = [min((form for form in _STORED if form in of_bucket), key=of_bucket.__getitem__) for of_bucket in measured]
    if len(measured) >= _PACKING_BUCKETS and all(Form.PACKED in of_bucket for of_bucket in measured):
        gains = [of_bucket[Form.PACKED] / of_bucket[form] for of_bucket, form in zip(measured, stored, strict=True)]
        if math.prod(gains) ** (1 / len(gains)) < _PACKING_GAIN:
            return (Form.PACKED,) * len(times)
    found = iter(stored)
    return tuple(next(found) if of_bucket else Form.ROWS for of_bucket in times)


def give_back_freed_memory() -> None:
    """To the system, what the C library keeps of weights that were read, converted or packed: a tenth of a process with
    a small model. Where it is another library than glibc, nothing."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def use_huge_pages(memory: Iterable[tuple[int, int]], limit_seconds: float = 2.0) -> int:
    """Asks Linux to move these (address, bytes) to huge pages now, and returns how many bytes it was asked for.

    A product of few rows reads every weight once: with pages of 4 KiB a good part of that time is address translation.
    Best effort: older kernels (before 6.1) collapse pages later by themselves, and others not at all.
    """
    deadline = time.monotonic() + limit_seconds
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    asked = 0
    for start, stop in joined(memory):
        first, last = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, stop // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if last <= first:
            continue
        madvise(first, last - first, _MADV_HUGEPAGE)
        for at in range(first, last, 32 * _HUGE_PAGE_BYTES):
            if time.monotonic() > deadline:
                return asked
            madvise(at, min(32 * _HUGE_PAGE_BYTES, last - at), _MADV_COLLAPSE)
        asked += last - first
    return asked


def joined(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (start, stop), those joined that an allocator put next to each other."""
    ranges: list[tuple[int, int]] = []
    for address, size in sorted(memory):
        if ranges and address - ranges[-1][1] <= 2**16:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], address + size))
        else:
            ranges.append((address, address + size))
    return ranges

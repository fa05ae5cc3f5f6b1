"""The `ModelRunner` protocol: what the loop needs from a device, and the plain values that cross the line. No torch.

The loop runs one step ahead: it submits step N+1 before it has read step N. A decode row of N+1 whose input token is
sampled by N carries `use_last_sampled`, as may any whose input was sampled in its slot; the runner keeps the last
sampled token of each slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from poolwright_engine.scheduling.sequence import SamplingParams, TokenLogprobs
from poolwright_protocol.kv import KVShape, blocks_for

T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A result that is being made; `result` waits, and raises what the device raised."""

    def result(self) -> T_co: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """The tokens so far of a sequence that takes a slot, without placeholders: from them the runner builds what its
    sampler remembers of the slot (penalty counts, the guide's state), and carries that on by itself."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


class Row(NamedTuple):
    """One sequence's part of a step: `length` positions of it are computed, from the one that `Step.starts` says.

    The row of a sequence that decodes says nothing that changes from step to step, and is the same object in nearly all
    of them, until its block table or its seat is another.

    `token_ids` has `length` ids, or is empty when the single input is the slot's last sampled token. `samples` is true
    when the row's last position yields a token; its absolute position is start + length.

    `block_ids` is the sequence's block table itself: at least the blocks of start + length tokens, perhaps more. It is
    a list that is only ever appended to, also while the step runs, and a sequence that loses its blocks gets another
    list: a runner that keeps a copy of each slot's table needs, while the list is the same object, only what is new.

    `num_draft`: the last `num_draft` of `token_ids` are guesses. The runner samples at the position of the token before
    them and at each of theirs, and keeps what it sampled up to the first that differs from the guess after it: between
    1 and num_draft + 1 tokens, the very ones that one step each would have sampled. `seat` comes with the first row of
    a sequence in a slot if its params need history. `next_token_id`: the prompt's token after the row, for the prompt's
    log probabilities; None where the row samples.
    """

    slot: int  # stable per running sequence, in [0, max_num_seqs)
    length: int
    token_ids: tuple[int, ...]
    block_ids: Sequence[int]
    samples: bool
    params: SamplingParams
    use_last_sampled: bool = False
    num_draft: int = 0
    seat: Seat | None = None
    next_token_id: int | None = None

    def table(self, start: int, block_size: int) -> tuple[int, ...]:
        """The blocks of positions [0, start + length), in order."""
        return tuple(self.block_ids[: blocks_for(start + self.length, block_size)])


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: chunks and decodes together. `starts`: of each row, its first position in its sequence."""

    number: int
    rows: tuple[Row, ...]
    starts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def contexts(self) -> Iterator[int]:
        """Of each row, how many tokens its last one attends to, itself included."""
        return (start + row.length for start, row in zip(self.starts, self.rows, strict=True))


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids[i]` and `logprobs[i]` belong to row i: the tokens it sampled, in order, and one entry for each;
    empty where it does not sample or asked for none. `prompt_logprobs[i]`: of the prompt tokens at positions
    start + 1 to start + length of a row whose params ask for them (without the token sampled), else empty.

    `errors`: (row index, why) of rows that cannot go on though the device can, such as one whose guide outgrew its
    limits: the tokens it may still have sampled before, in its entry, stand; its request ends with that error."""

    number: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    busy_seconds: float  # time the device worked on this step
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()


class ModelRunner(Protocol):
    """Steps run in submission order. All methods are called from the loop's thread only."""

    kv_shape: KVShape
    vocab_size: int
    num_blocks: int  # block 0 is the null block: never allocated, pads tables
    num_host_blocks: int  # room for swapped-out blocks, ids from 0; 0: no swapping
    block_size: int

    def submit(self, step: Step) -> Handle[StepResult]: ...

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> Handle[bytes]:
        """KV of those blocks as they are after the steps submitted so far: K then V, C order
        (2, layers, blocks, block_size, kv_heads, head_size) in the cache's dtype."""
        ...

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> Handle[None]:
        """The reverse; before any step submitted later."""
        ...

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> Handle[None]:
        """Copy those blocks of all layers to host memory, as they are after the steps submitted so far."""
        ...

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> Handle[None]:
        """The reverse; before any step submitted later."""
        ...

    def close(self) -> None: ...

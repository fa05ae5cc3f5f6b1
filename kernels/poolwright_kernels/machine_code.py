"""What a compiled kernel does, read from its disassembly: registers, stack, and what each of its loops does.

A loop is found by its back edge: a jump to a block that every way to the jump comes through. Its body is all blocks
from which the jump can be reached without passing that block again. Knows NVIDIA's assembly, and nothing of Triton.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w+|\$[\w$]+):")
_TARGET = re.compile(r"`\((\.L\w+|\$[\w$]+)\)")
_WIDTH = re.compile(r"\.(U?(?:8|16)|S8|S16|64|128|256)\b")

# Instructions that multiply matrices, by the name that the programming guide gives them.
MATRIX = {
    "HMMA": "mma",  # one warp
    "IMMA": "mma",
    "QMMA": "mma",
    "OMMA": "mma",
    "HGMMA": "wgmma",  # a group of warps, Hopper
    "IGMMA": "wgmma",
    "QGMMA": "wgmma",
    "UTCHMMA": "tcgen05",  # into tensor memory, Blackwell
    "UTCIMMA": "tcgen05",
    "UTCQMMA": "tcgen05",
    "UTCOMMA": "tcgen05",
}
_COPIES = {"LDGSTS", "UTMALDG", "UBLKCP"}  # from global into shared memory while the program goes on
_LOADS = {"LDG", "LD"}
_STORES = {"STG", "ST"}
_SPILLS = {"LDL", "STL"}


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop that moves or multiplies anything; loops that only wait are not counted."""

    instructions: int
    matrix: tuple[tuple[str, int], ...]  # ("wgmma", 8): instructions of each kind, one body
    asynchronous_copies: int
    loads: int  # from global memory into registers
    spills: int  # loads and stores of spilled registers


@dataclass(frozen=True, slots=True)
class MachineCode:
    registers: int
    stack_bytes: int
    spills: int  # instructions, in loops and outside
    loops: tuple[Loop, ...]  # in the order of their addresses
    widest_load_bits: int  # from and to global memory, asynchronous copies too
    widest_store_bits: int


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str  # with its modifiers: "LDG.E.128"
    guarded: bool  # by a predicate
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


@dataclass(slots=True)
class Block:
    """Instructions that run one after another. `after` are indices of the blocks that may come next."""

    instructions: list[Instruction]
    after: list[int]


def read_machine_code(path: Path, tools: Path) -> MachineCode:
    """Of the one kernel in a cubin. `tools`: the folder of cuobjdump and nvdisasm, of the version that compiled it."""
    usage = _run(tools / "cuobjdump", "-res-usage", path)
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump said nothing of registers: {usage}")
    blocks = blocks_of(_run(tools / "nvdisasm", "-c", path).splitlines())
    everything = [instruction for block in blocks for instruction in block.instructions]
    return MachineCode(
        registers=int(registers[1]),
        stack_bytes=int(stack[1]),
        spills=_count(everything, _SPILLS),
        loops=tuple(loops_of(blocks)),
        widest_load_bits=_widest(everything, _LOADS | _COPIES),
        widest_store_bits=_widest(everything, _STORES),
    )


def blocks_of(lines: Iterable[str]) -> list[Block]:
    """The blocks of a disassembly in the order of their addresses, joined by their jumps."""
    blocks: list[Block] = []
    labels: dict[str, int] = {}
    begins = True
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(blocks)
            begins = True
        elif found := _LINE.match(line):
            if begins:
                blocks.append(Block([], []))
            instruction = Instruction(found[3], found[2] not in (None, "PT", "UPT"), found[4])
            blocks[-1].instructions.append(instruction)
            begins = _ends_block(instruction)
    for index, block in enumerate(blocks):
        last = block.instructions[-1]
        goes_on = not _ends_block(last) or last.guarded or _has_condition(last)
        if goes_on and index + 1 < len(blocks):
            block.after.append(index + 1)
        if (
            _jumps(last)
            and (target := _TARGET.search(last.operands))
            and labels.get(target[1], len(blocks)) < len(blocks)
        ):
            block.after.append(labels[target[1]])
    return blocks


def loops_of(blocks: Sequence[Block]) -> list[Loop]:
    """Innermost loops with any work in them, in the order of their first block."""
    dominators = _dominators(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for following in block.after:
            before[following].append(index)
    bodies: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for head in block.after:
            if head not in dominators[index]:
                continue
            body = bodies.setdefault(head, {head})
            open_blocks = [index]
            while open_blocks:
                member = open_blocks.pop()
                if member not in body:
                    body.add(member)
                    open_blocks.extend(before[member])
    works = {head: body for head, body in bodies.items() if _works(blocks, body)}
    return [
        _loop(blocks, body)
        for head, body in sorted(works.items())
        if not any(other in body for other in works if other != head)
    ]


def _dominators(blocks: Sequence[Block]) -> list[set[int]]:
    """For each block, those that every way to it comes through; of a block that cannot be reached, none."""
    reached = {0}
    open_blocks = [0]
    while open_blocks:
        for following in blocks[open_blocks.pop()].after:
            if following not in reached:
                reached.add(following)
                open_blocks.append(following)
    before: list[list[int]] = [[] for _ in blocks]
    for index in reached:
        for following in blocks[index].after:
            before[following].append(index)
    dominators = [set(reached) if index in reached else set() for index in range(len(blocks))]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in sorted(reached - {0}):
            common = set.intersection(*(dominators[other] for other in before[index])) | {index}
            if common != dominators[index]:
                dominators[index] = common
                changed = True
    return dominators


def _works(blocks: Sequence[Block], body: set[int]) -> bool:
    return any(
        instruction.kind in MATRIX.keys() | _COPIES | _LOADS | _STORES
        for index in body
        for instruction in blocks[index].instructions
    )


def _loop(blocks: Sequence[Block], body: set[int]) -> Loop:
    instructions = [instruction for index in sorted(body) for instruction in blocks[index].instructions]
    matrix: dict[str, int] = {}
    for instruction in instructions:
        if kind := MATRIX.get(instruction.kind):
            matrix[kind] = matrix.get(kind, 0) + 1
    return Loop(
        instructions=len(instructions),
        matrix=tuple(sorted(matrix.items())),
        asynchronous_copies=_count(instructions, _COPIES),
        loads=_count(instructions, _LOADS),
        spills=_count(instructions, _SPILLS),
    )


def _count(instructions: Iterable[Instruction], kinds: set[str]) -> int:
    return sum(instruction.kind in kinds for instruction in instructions)


def _widest(instructions: Iterable[Instruction], kinds: set[str]) -> int:
    widest = 0
    for instruction in instructions:
        if instruction.kind in kinds:
            width = _WIDTH.search(instruction.name)
            widest = max(widest, int(width[1].lstrip("US")) if width else 32)
    return widest


def _jumps(instruction: Instruction) -> bool:
    """A call that never returns is how older targets spell a far jump; one into a subroutine comes back."""
    if instruction.kind == "CALL":
        target = _TARGET.search(instruction.operands)
        return target is not None and target[1].startswith(".L")
    return instruction.kind in ("BRA", "JMP", "BRX", "JMX")


def _ends_block(instruction: Instruction) -> bool:
    return _jumps(instruction) or instruction.kind in ("EXIT", "RET")


def _has_condition(instruction: Instruction) -> bool:
    """`BRA.U UP0, target` and `BRA.DIV UR4, target` carry their condition as an operand."""
    return _jumps(instruction) and "," in instruction.operands.partition("`")[0]


def _run(tool: Path, *arguments: str | Path) -> str:
    # Their warnings about the format of newer targets do not concern what is read here.
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout

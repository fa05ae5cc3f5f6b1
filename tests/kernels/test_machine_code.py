"""Reading loops out of disassemblies: the shapes that compilers give them, in a few lines each."""

from poolwright_kernels.ahead_of_time import occupancy
from poolwright_kernels.machine_code import Loop, blocks_of, loops_of


def disassembly(text: str) -> list[str]:
    """Lines as nvdisasm writes them; a line without a colon at its end is an instruction."""
    lines = []
    for number, line in enumerate(text.split("\n")):
        line = line.strip()
        lines.append(line if line.endswith(":") else f"        /*{number * 16:04x}*/                   {line} ;")
    return lines


def loops(text: str) -> list[Loop]:
    return loops_of(blocks_of(disassembly(text.strip())))


def test_a_loop_is_what_runs_again() -> None:
    (loop,) = loops("""
        LDG.E.128 R4, [R2.64]
        .L_x_0:
        LDGSTS.E.BYPASS.128 [R10], [R4.64]
        HMMA.16816.F32.BF16 R8, R4, R5, R8
        HMMA.16816.F32.BF16 R8, R4, R6, R8
        @P0 BRA `(.L_x_0)
        STG.E.128 [R2.64], R8
        EXIT
    """)
    assert loop == Loop(4, (("mma", 2),), asynchronous_copies=1, loads=0, spills=0)


def test_of_nested_loops_the_inner_counts() -> None:
    (loop,) = loops("""
        .L_x_0:
        LDG.E R4, [R2.64]
        .L_x_1:
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8]
        STL [R1], R4
        @P0 BRA `(.L_x_1)
        @P1 BRA `(.L_x_0)
        EXIT
    """)
    assert loop.matrix == (("wgmma", 1),)
    assert (loop.loads, loop.spills, loop.instructions) == (0, 1, 3)


def test_waiting_out_of_line_is_part_of_the_loop_and_none_of_its_own() -> None:
    """A failed wait jumps behind the end of the kernel, spins there, and jumps back up."""
    (loop,) = loops("""
        .L_x_0:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4
        @!P1 BRA `(.L_x_2)
        .L_x_1:
        UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR12]
        LDGSTS.E.128 [R10], [R4.64]
        @P0 BRA `(.L_x_0)
        STG.E.128 [R2.64], R8
        EXIT
        .L_x_2:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4
        @!P1 BRA `(.L_x_2)
        BRA `(.L_x_1)
    """)
    assert loop.matrix == (("tcgen05", 1),)
    assert loop.asynchronous_copies == 1


def test_a_far_jump_spelled_as_a_call_ends_a_loop() -> None:
    """Older targets leave a loop by a call that never returns."""
    (loop,) = loops("""
        .L_x_0:
        HMMA.16816.F32 R8, R4, R5, R8
        @P1 CALL.REL.NOINC `(.L_x_1)
        BRA `(.L_x_0)
        .L_x_1:
        STG.E [R2.64], R8
        EXIT
    """)
    assert loop.instructions == 3


def test_a_jump_up_into_code_that_another_way_reaches_is_no_loop() -> None:
    assert (
        loops("""
        @P0 BRA `(.L_x_1)
        .L_x_0:
        STG.E [R2.64], R8
        EXIT
        .L_x_1:
        LDG.E R8, [R2.64]
        BRA `(.L_x_0)
    """)
        == []
    )


def test_a_condition_may_be_an_operand() -> None:
    (loop,) = loops("""
        .L_x_0:
        LDG.E R8, [R2.64]
        BRA.U UP0, `(.L_x_0)
        EXIT
    """)
    assert loop.loads == 1


def test_occupancy_is_that_of_the_tables_of_the_programming_guide() -> None:
    assert occupancy(80, warps=8, registers=32, shared_bytes=0, tensor_columns=0) == 8  # 64 warps
    assert occupancy(80, warps=8, registers=64, shared_bytes=0, tensor_columns=0) == 4  # 65536 registers
    assert occupancy(90, warps=4, registers=168, shared_bytes=40 << 10, tensor_columns=0) == 3
    assert occupancy(90, warps=4, registers=32, shared_bytes=100 << 10, tensor_columns=0) == 2  # 228 KiB
    assert occupancy(120, warps=4, registers=32, shared_bytes=99 << 10, tensor_columns=0) == 1
    assert occupancy(120, warps=4, registers=32, shared_bytes=100 << 10, tensor_columns=0) == 0
    assert occupancy(100, warps=8, registers=255, shared_bytes=0, tensor_columns=256) == 1
    assert occupancy(100, warps=4, registers=64, shared_bytes=0, tensor_columns=256) == 2  # 512 columns
    assert occupancy(120, warps=1, registers=16, shared_bytes=0, tensor_columns=0) == 24

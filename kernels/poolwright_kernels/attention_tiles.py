"""Tile shapes of hybrid attention: a frozen table, so that nothing is tuned, and nothing compiled twice, while serving.

A row of a tile is one query head of one token; the heads that share a KV head are packed as rows. The shapes were
chosen ahead of time by registers, spills, shared memory and the instructions of each loop (`poolwright_kernels.inspect`
prints them); no time on a GPU has gone into them yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """large: tiles of prefill chunks; small: tiles of decodes. stages counts the page-table load too, so that 5 stages
    are two tiles of keys and values on their way while a third is worked on (Triton halves the distance of a load whose
    address is loaded). one_large_loop: every tile of keys is masked, not only those at an edge, so that two or three
    loops become one, which takes fewer registers."""

    large_rows: int
    large_keys: int
    large_stages: int
    small_rows: int
    small_keys: int
    small_stages: int
    warps: int
    programs_per_multiprocessor: int
    one_large_loop: bool = False

    @property
    def registers(self) -> int:
        """Of a thread, where the programs of a multiprocessor share all of them. The assembler, left to itself, spills
        to fit one program more."""
        threads = 32 * self.warps * self.programs_per_multiprocessor
        return min(65536 // threads // 8 * 8, 255)

    @property
    def launch(self) -> list[int]:
        """What a launch needs, as torch.library can carry it."""
        return [
            self.large_rows,
            self.large_keys,
            self.large_stages,
            self.small_rows,
            self.small_keys,
            self.small_stages,
            self.warps,
            self.registers,
            int(self.one_large_loop),
        ]

    def large_tokens(self, group: int) -> int:
        """Query tokens of one large tile; rows past them are masked where the group does not divide the rows."""
        return self.large_rows // group

    def small_tokens(self, group: int) -> int:
        return self.small_rows // group


def tiles_for(
    head_size: int,
    group: int,
    has_chunks: bool,
    element_bytes: int = 2,
    capability: int = 90,
    cache_bytes: int | None = None,
) -> Tiles:
    """group: query heads for each KV head. element_bytes: of the queries; cache_bytes: of the cache, None: the same.
    capability: 80, 90, 100, 120."""
    if head_size > 256:
        raise ValueError(f"head size {head_size} is not supported: at most 256")
    if group > 128:
        raise ValueError(f"{group} query heads for each KV head are not supported: at most 128")
    small_rows = 16
    while small_rows < group:
        small_rows *= 2
    wide = head_size > 128 or element_bytes > 2
    keys = (32 if small_rows <= 32 else 16) if wide else 64
    is_padded = head_size & (head_size - 1) > 0  # to a power of two, and masked for it, which takes registers
    if not has_chunks and small_rows > 16:
        # A third program would leave too few registers for 32 rows, a second for more, which take twice the warps.
        warps, programs = (4, 2) if small_rows == 32 else (8, 1)
        return Tiles(128, keys, 3, small_rows, keys, 5, warps, programs)
    if not has_chunks:
        # Converting an 8-bit cache takes registers, of which a third program would leave too few.
        programs = 2 if wide or (cache_bytes == 1 and (is_padded or head_size > 64)) else 3
        return Tiles(128, keys, 3, small_rows, keys, 5, warps=4, programs_per_multiprocessor=programs)
    large_rows = max(64, small_rows) if wide else 128
    # tcgen05 reads where a tile of 16 elements of the head lies in shared memory from a pair of registers, and the
    # compiler keeps them for all loops at once: with more than one, heads of 256 do not fit. Nor do they beside the
    # conversion of an 8-bit cache for wgmma, nor padded heads beside that for mma on sm_120.
    converts, is_120 = cache_bytes == 1, capability >= 120
    crowded = head_size > 128 and (100 <= capability < 120 or (converts and 90 <= capability < 100))
    crowded |= is_120 and converts and is_padded
    large_keys = 32 if is_120 and (is_padded or (converts and head_size > 64)) else keys
    return Tiles(
        large_rows, large_keys, 3, small_rows, keys, 5, 8, programs_per_multiprocessor=1, one_large_loop=crowded
    )

/* Matrix tiles (AMX), where the CPU has them and the system lets us: registers of 16 rows of 64 bytes, whose shapes a
 * thread sets. Others of the process use them too, and may believe that a thread still has the shapes they gave it: who
 * sets shapes restores those that were there. */

#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* GCC is not told what memory the tile instructions read and write. */
#define ALL_MEMORY __asm__ volatile("" ::: "memory")

enum { BFLOAT16_TILES = 1 << 22, ANY_TILES = 1 << 24, INT8_TILES = 1 << 25 }; /* bits of CPUID's leaf 7 */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

/* `kind`: BFLOAT16_TILES or INT8_TILES. Asking again costs a system call: the caller keeps the answer. */
static int tiles_are_there(unsigned kind) {
    unsigned a, b, c, d = 0, wanted = ANY_TILES | kind;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Eight tiles of 64 bytes a row, the first six of `rows` rows, the others of 16. */
static __attribute__((noinline, target("amx-tile"))) void shape_tiles(int64_t rows, TileShapes *before) {
    TileShapes ours;
    memset(&ours, 0, sizeof ours);
    ours.palette = 1;
    for (int i = 0; i < 8; i++) {
        ours.bytes[i] = 64;
        ours.rows[i] = i < 6 ? (uint8_t)rows : 16;
    }
    ALL_MEMORY;
    _tile_storeconfig(before);
    _tile_loadconfig(&ours);
    ALL_MEMORY;
}

static __attribute__((noinline, target("amx-tile"))) void restore_tiles(const TileShapes *before) {
    ALL_MEMORY;
    _tile_loadconfig(before);
}

/* Products with a weight of 8 bits: x is rounded to levels of 8 bits, row by row, sums of products of integers are
 * exact, and what comes out is scaled back. Between x and the result nothing leaves the cache but levels.
 *
 * A weight lies in panels of 32 outputs. In a panel come the first 4 inputs of all its outputs, then the next 4, and so
 * on: what AVX512-VNNI multiplies at once, and what a tile of AMX reads in rows. Weights are stored with 128 added, as
 * both want one factor unsigned; 128 times the sum of a row's levels is taken off again. Outputs are filled up to whole
 * panels, inputs to whole tiles.
 *
 * Integer sums are the same on every CPU and in any order, so a row's result depends on nothing but the row. */

/* A product and a sum are rounded one after the other, with fused instructions or without: levels are the same on every
 * CPU. Where both are to be one, __builtin_fmaf says so. */
#pragma GCC optimize("fp-contract=off")

#include <float.h>
#include <stdlib.h>
#include <unistd.h>

#include "element.h"

enum {
    PANEL = 32,                             /* outputs */
    GROUP = 4,                              /* inputs */
    STEP = 64,                              /* inputs of a tile */
    TILE_ROWS = 16,                         /* most */
    CHUNK = 2 * TILE_ROWS,                  /* rows of levels that one set of tiles takes */
    VECTOR_ROWS = 8,                        /* whose sums the registers hold; for more, tiles are faster */
    ZERO = 128,                             /* added to stored weights */
    FINE_STEPS = 254,                       /* of one level: what rounding leaves out is at most half of one */
    EXACT_INPUTS = (1 << 24) / (127 * 127), /* their sums are exact in float32 too */
    CACHED_BYTES = 1 << 19,                 /* of levels, which each panel reads again */
    PARALLEL_BYTES = 1 << 15,               /* below, waking other threads costs more than they save */
    AHEAD = 2048,                           /* bytes of a weight that are on their way */
};

#define TINY 1e-12f /* counts as the largest element of a row of zeros */

/* As Python fills it. */
typedef struct {
    int64_t out_features, in_features;
    int64_t panels, size;   /* filled up: of 32 outputs; of inputs, a multiple of 64 */
    int64_t sets;           /* of levels for a row: 1, or 2 with what the first left out */
    const uint8_t *weights; /* (panels, size / 4, 32, 4) */
    const float *scales;    /* (panels · 32) */
    const float *bias;      /* (panels · 32), or NULL */
} int8_weight;

/* x, rounded. Sets of a row follow each other. */
typedef struct {
    int8_t *levels; /* (sets · rows of x, and up to whole tiles; size) */
    int32_t *zeros; /* (sets · rows of x): what their sums have too much */
    float *scales;  /* (rows of x) */
} rounded_rows;

typedef int32_t panel_sums[PANEL];

/* ---- Sums of one panel with up to CHUNK rows of levels, (rows, PANEL) int32 ---- */

#if defined(__AVX512VNNI__)
#include <immintrin.h>

INLINE void vector_sums_of(int rows, const int8_t *levels, int64_t size, const uint8_t *panel, panel_sums *sums) {
    __m512i first[VECTOR_ROWS], second[VECTOR_ROWS];
    for (int r = 0; r < rows; r++) first[r] = second[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += GROUP, panel += GROUP * PANEL) {
        _mm_prefetch((const char *)panel + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)panel + AHEAD + 64, _MM_HINT_T0);
        __m512i left = _mm512_load_si512(panel), right = _mm512_load_si512(panel + 64);
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, levels + r * size + i, GROUP);
            __m512i x = _mm512_set1_epi32(four);
            first[r] = _mm512_dpbusd_epi32(first[r], left, x);
            second[r] = _mm512_dpbusd_epi32(second[r], right, x);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_si512(sums[r], first[r]);
        _mm512_storeu_si512(sums[r] + PANEL / 2, second[r]);
    }
}

static void vector_sums(int64_t rows, const int8_t *levels, int64_t size, const uint8_t *panel, panel_sums *sums) {
    for (; rows > 0; rows -= VECTOR_ROWS, levels += VECTOR_ROWS * size, sums += VECTOR_ROWS) {
        switch (rows) {
            case 1: vector_sums_of(1, levels, size, panel, sums); break;
            case 2: vector_sums_of(2, levels, size, panel, sums); break;
            case 3: vector_sums_of(3, levels, size, panel, sums); break;
            case 4: vector_sums_of(4, levels, size, panel, sums); break;
            case 5: vector_sums_of(5, levels, size, panel, sums); break;
            case 6: vector_sums_of(6, levels, size, panel, sums); break;
            case 7: vector_sums_of(7, levels, size, panel, sums); break;
            default: vector_sums_of(8, levels, size, panel, sums);
        }
    }
}

#elif defined(__AVX2__)
#include <immintrin.h>

/* Up to two rows with half a panel at a time, in 16 bits: sums of two products of 8 bits would overflow those. */
INLINE void vector_sums_of(int rows, const int8_t *levels, int64_t size, const uint8_t *panel, panel_sums *sums) {
    for (int half = 0; half < PANEL; half += 16) {
        __m256i sum[2][4]; /* of four outputs each, in two parts */
        for (int r = 0; r < rows; r++) {
            for (int q = 0; q < 4; q++) sum[r][q] = _mm256_setzero_si256();
        }
        const uint8_t *weights = panel + half * GROUP;
        for (int64_t i = 0; i < size; i += GROUP, weights += GROUP * PANEL) {
            __m256i x[2];
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, levels + r * size + i, GROUP);
                x[r] = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
            }
            for (int q = 0; q < 4; q++) {
                __m256i w = _mm256_cvtepu8_epi16(_mm_load_si128((const __m128i *)weights + q));
                for (int r = 0; r < rows; r++) sum[r][q] = _mm256_add_epi32(sum[r][q], _mm256_madd_epi16(w, x[r]));
            }
        }
        for (int r = 0; r < rows; r++) {
            for (int q = 0; q < 4; q += 2) {
                __m256i crossed = _mm256_hadd_epi32(sum[r][q], sum[r][q + 1]);
                _mm256_storeu_si256((__m256i *)(sums[r] + half + q * 4), _mm256_permute4x64_epi64(crossed, 0xd8));
            }
        }
    }
}

static void vector_sums(int64_t rows, const int8_t *levels, int64_t size, const uint8_t *panel, panel_sums *sums) {
    for (; rows > 1; rows -= 2, levels += 2 * size, sums += 2) vector_sums_of(2, levels, size, panel, sums);
    if (rows) vector_sums_of(1, levels, size, panel, sums);
}

#else

static void vector_sums(int64_t rows, const int8_t *levels, int64_t size, const uint8_t *panel, panel_sums *sums) {
    for (int64_t r = 0; r < rows; r++, levels += size) {
        int32_t sum[PANEL] = {0};
        for (int64_t i = 0; i < size; i += GROUP) {
            const uint8_t *weights = panel + i * PANEL;
            for (int j = 0; j < PANEL; j++) {
                for (int g = 0; g < GROUP; g++) sum[j] += (int16_t)weights[j * GROUP + g] * (int16_t)levels[i + g];
            }
        }
        memcpy(sums[r], sum, sizeof sum);
    }
}

#endif

#if defined(__AVX512VNNI__) && defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include "tiles.h"
#define TILED __attribute__((target("amx-tile,amx-int8")))

static int has_tiles(void) {
    static int known = -1; /* threads that find it out at once find the same */
    if (known < 0) known = tiles_are_there(INT8_TILES);
    return known;
}

INLINE void fetch(const uint8_t *weights) {
    for (int i = 0; i < STEP * PANEL; i += 64) __builtin_prefetch(weights + AHEAD + i);
}

/* Tiles 0–3 are sums, 4 and 5 levels, 6 and 7 weights. */
TILED static void one_tile_sums(int64_t rows, const int8_t *levels, int64_t size, const uint8_t *panel,
                                panel_sums *sums) {
    (void)rows;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < size; i += STEP, panel += STEP * PANEL) {
        fetch(panel);
        _tile_loadd(4, levels + i, size);
        _tile_loadd(6, panel, GROUP * PANEL);
        _tile_loadd(7, panel + 64, GROUP * PANEL);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    _tile_stored(0, sums[0], sizeof *sums);
    _tile_stored(1, sums[0] + PANEL / 2, sizeof *sums);
}

TILED static void two_tile_sums(int64_t rows, const int8_t *levels, int64_t size, const uint8_t *panel,
                                panel_sums *sums) {
    const int8_t *others = levels + rows * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < size; i += STEP, panel += STEP * PANEL) {
        _tile_loadd(4, levels + i, size);
        _tile_loadd(6, panel, GROUP * PANEL);
        _tile_loadd(7, panel + 64, GROUP * PANEL);
        _tile_loadd(5, others + i, size);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums[0], sizeof *sums);
    _tile_stored(1, sums[0] + PANEL / 2, sizeof *sums);
    _tile_stored(2, sums[rows], sizeof *sums);
    _tile_stored(3, sums[rows] + PANEL / 2, sizeof *sums);
}

#else
INLINE int has_tiles(void) { return 0; }
typedef struct { int none; } TileShapes;
INLINE void shape_tiles(int64_t rows, TileShapes *before) { (void)rows, (void)before; }
INLINE void restore_tiles(const TileShapes *before) { (void)before; }
#define one_tile_sums vector_sums
#define two_tile_sums vector_sums
#endif

/* ---- What surrounds them ---- */

/* v / step, correctly rounded (Markstein, "Computation of elementary functions on the IBM RISC System/6000
 * processor", 1990): dividing would cost more than multiplying with the weight. */
INLINE float quotient(float v, float step, float inverse) {
#if defined(__FMA__)
    float near = v * inverse;
    return __builtin_fmaf(__builtin_fmaf(-near, step, v), inverse, near);
#else
    (void)inverse;
    return v / step;
#endif
}

/* To the nearest integer, ties to even, for |x| < 2²². */
INLINE float nearest(float x) {
    const float large = 12582912.0f; /* 1.5 · 2²³: no bits are left for a fraction */
    return (x + large) - large;
}

#define BODY "int8_product_body.h"
#include "each_element.h"

/* Causal attention of a mixed batch, straight from the paged cache: no gather, no mask in memory, float32 inside.
 *
 * A task is some queries of a row, one kv head, and a range of keys. Its query vectors are the heads that share the kv
 * head, query by query, so that keys and values are read once for all of them. Keys are taken in blocks at fixed
 * positions, and a block a query does not see changes nothing of what it has, so a query's result depends on its own
 * row only, while values are finite: not on the rows beside it, nor on how many queries share its task, nor on threads. Rows of few queries are
 * split at fixed positions too; the pieces are merged in order. */

#include "element.h"

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, ROWS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 4 };
#else
enum { LANES = 4, ROWS = 2 };
#endif

enum {
    KEYS = 128,           /* of a block: what the softmax is rescaled by */
    SPLIT_KEYS = 512,     /* of a piece of a row of few queries; a multiple of KEYS */
    SHORT_VECTORS = 32,   /* query vectors up to which a row's context is split */
    TASK_VECTORS = 96,    /* of a longer row: as many queries as come to this, at least one */
    AHEAD = 16,           /* keys between the one that is read and the one that is fetched */
    PAD = 32,             /* sizes, scores and the vectors of tiles are padded to multiples of this */
    PARALLEL_WORK = 1 << 15, /* multiplications below which waking other threads costs more than they save */
};

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float loose_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t loose_words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t loose_word __attribute__((may_alias));
typedef float four __attribute__((vector_size(16)));
typedef float loose_four __attribute__((vector_size(16), aligned(4), may_alias));

/* Queries [offset, offset + queries) of a row, keys at positions [from, to). */
typedef struct {
    int64_t row, offset, queries, from, to;
    int64_t pieces;  /* in the first task of those queries: how many tasks share them; in those after it: 0 */
    int64_t partial; /* where its result waits for the merge, in query vectors of one kv head */
} Task;

typedef struct {
    int64_t rows, heads, kv_heads, size, block_size;
    const int64_t *first;  /* (rows,) index of a row's first query in the batch */
    const int64_t *start;  /* (rows,) its position */
    const int64_t *length; /* (rows,) queries */
    const int64_t *table;  /* (rows,) where a row's blocks begin in `blocks` */
    const int64_t *blocks;
    int64_t window;  /* keys a query sees at most; 0: all */
    double scale, soft_cap; /* soft_cap 0: none */
    /* Of `attention_tasks`: */
    int64_t tasks, task_bytes, partial_bytes, work, has_tiles;
    Task *task;     /* task_bytes */
    float *partial; /* partial_bytes: (query vectors of one kv head · kv_heads, padded size + 2) */
} Plan;

/* Keys [low, high) after position `base`, and the query vectors [begin, end) of a task that see some of them; those see
 * no key after their own position, the first vector's is `position`. */
typedef struct {
    int64_t base, low, high, begin, end, position, group;
} Block;

INLINE int64_t down(int64_t x, int64_t unit) { return x / unit * unit; }
INLINE int64_t padded(int64_t size) { return up(size, PAD); }

/* Where the keys end that some vector up to `vector` sees. */
INLINE int64_t seen_end(const Block *block, int64_t vector) {
    return smaller(block->high, block->position + vector / block->group + 1 - block->base);
}

/* Beyond a small x as 1 - 2 / (1 + e^2x), else Cephes' polynomial (Moshier, netlib.org/cephes). */
INLINE float hyperbolic_tangent(float x) {
    float size = fabsf(x), square = x * x;
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    float small = p * square * x + x;
    float large = copysignf(1.0f - 2.0f / (1.0f + exponential(2.0f * size)), x);
    return size < 0.625f ? small : large;
}

/* Where one is NaN, b. */
INLINE lanes greater(lanes a, lanes b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#else
    words is_a = (words)(a > b);
    return (lanes)((is_a & (words)a) | (~is_a & (words)b));
#endif
}

INLINE float greatest_of(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#else
    float greatest = x[0];
    for (int i = 1; i < LANES; i++) greatest = x[i] > greatest ? x[i] : greatest;
    return greatest;
#endif
}

INLINE float sum_of(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#else
    float sum = x[0];
    for (int i = 1; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

/* The sums over the lanes of four vectors. */
INLINE four sums_of_four(lanes a, lanes b, lanes c, lanes d) {
#if defined(__AVX512F__)
    lanes ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    lanes cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    __m512d ab_pairs = (__m512d)ab, cd_pairs = (__m512d)cd;
    lanes all = (lanes)_mm512_unpacklo_pd(ab_pairs, cd_pairs) + (lanes)_mm512_unpackhi_pd(ab_pairs, cd_pairs);
    __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#else
    four sum = {0, 0, 0, 0};
    for (int i = 0; i < LANES; i++) sum += (four){a[i], b[i], c[i], d[i]};
    return sum;
#endif
}

#if defined(__AVX512F__)
/* 16 × 16 words; each column to `stride` words after the one before. */
INLINE void transpose(const __m512i *rows, uint32_t *to, int64_t stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* b[i], b[i + 4]..: columns i, i + 4, i + 8, i + 12 of four rows each */
        __m512i even_top = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        __m512i even_low = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        __m512i odd_top = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        __m512i odd_low = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
        _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(even_top, even_low, 0x88));
        _mm512_storeu_si512(to + (i + 4) * stride, _mm512_shuffle_i32x4(odd_top, odd_low, 0x88));
        _mm512_storeu_si512(to + (i + 8) * stride, _mm512_shuffle_i32x4(even_top, even_low, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * stride, _mm512_shuffle_i32x4(odd_top, odd_low, 0xdd));
    }
}
#endif

/* Scores become the softmax's numerators: scaled, capped, unseen ones 0, relative to the largest score so far.
 * Returns what earlier sums shrink by. scores: [begin, end), multiples of PAD; seen: [low, high). */
static float soften(float *scores, int64_t begin, int64_t end, int64_t low, int64_t high, float scale, float cap,
                    float *top, float *sum) {
    if (cap) {
        for (int64_t i = begin; i < end; i++) scores[i] = cap * hyperbolic_tangent(scores[i] * (scale / cap));
        scale = 1;
    }
    for (int64_t i = begin; i < low; i++) scores[i] = -INFINITY;
    for (int64_t i = high; i < end; i++) scores[i] = -INFINITY;
    lanes most = (lanes){0} + *top;
    for (int64_t i = begin; i < end; i += LANES) {
        lanes scaled = *(loose_lanes *)(scores + i) * scale;
        *(loose_lanes *)(scores + i) = scaled;
        most = greater(scaled, most);
    }
    float largest = greatest_of(most);
    float zero = largest == -INFINITY ? 0 : largest; /* nothing seen yet: every numerator is 0 */
    for (int64_t i = begin; i < end; i++) scores[i] = exponential(scores[i] - zero);
    lanes added = {0};
    for (int64_t i = begin; i < end; i += LANES) added += *(loose_lanes *)(scores + i);
    float shrink = exponential(*top - zero);
    *top = largest;
    *sum = *sum * shrink + sum_of(added);
    return shrink;
}

#if defined(__AVX512BF16__) && defined(__linux__)
#define TILES 1
#include "tiles.h"

enum { TILE = 16 };

static int has_tiles(void) {
    static int known = -1; /* threads that find it out at once find the same */
    if (known < 0) known = tiles_are_there(BFLOAT16_TILES);
    return known;
}

#define WITH_TILES static __attribute__((noinline, target("amx-tile,amx-bf16")))

/* sums (2 · TILE rows, 2 · TILE) += a (2 · TILE rows, count words) · b (count, 2 · TILE words), two bfloat16 in each
 * word; count is a multiple of TILE, strides are in words. */
WITH_TILES void multiply_tiles(float *sums, int64_t sums_stride, const void *a, int64_t a_stride, const void *b,
                               int64_t b_stride, int64_t count, int is_fresh) {
    ALL_MEMORY;
    if (is_fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, sums_stride * 4);
        _tile_loadd(1, sums + TILE, sums_stride * 4);
        _tile_loadd(2, sums + TILE * sums_stride, sums_stride * 4);
        _tile_loadd(3, sums + TILE * sums_stride + TILE, sums_stride * 4);
    }
    for (int64_t i = 0; i < count; i += TILE) {
        _tile_loadd(4, (const float *)a + i, a_stride * 4);
        _tile_loadd(5, (const float *)a + TILE * a_stride + i, a_stride * 4);
        _tile_loadd(6, (const float *)b + i * b_stride, b_stride * 4);
        _tile_loadd(7, (const float *)b + i * b_stride + TILE, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, sums_stride * 4);
    _tile_stored(1, sums + TILE, sums_stride * 4);
    _tile_stored(2, sums + TILE * sums_stride, sums_stride * 4);
    _tile_stored(3, sums + TILE * sums_stride + TILE, sums_stride * 4);
    ALL_MEMORY;
}
#else
#define TILES 0
#endif

/* to_bfloat16 of each lane, in the high half of its word. */
INLINE words rounded(lanes x) {
    words bits = (words)x;
    words nearest = bits + 0x7fff + ((bits >> 16) & 1);
    words is_nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    return (is_nan & (bits | 0x400000)) | (~is_nan & nearest);
}

/* Says what room tasks and pieces need, and writes the tasks once they have it. */
EXPORT void attention_tasks(Plan *plan) {
    int64_t tasks = 0, partials = 0, work = 0, group = plan->heads / plan->kv_heads;
    for (int64_t row = 0; row < plan->rows; row++) {
        int64_t length = plan->length[row], start = plan->start[row];
        int is_short = length * group <= SHORT_VECTORS;
        int64_t step = is_short ? length : larger(1, TASK_VECTORS / group);
        for (int64_t offset = 0; offset < length; offset += step) {
            int64_t queries = smaller(step, length - offset);
            int64_t from = plan->window ? larger(0, start + offset + 1 - plan->window) : 0;
            int64_t stop = start + offset + queries;
            int64_t pieces = is_short ? (stop - 1) / SPLIT_KEYS - from / SPLIT_KEYS + 1 : 1;
            work += queries * (stop - from);
            for (int64_t piece = 0; piece < pieces; piece++) {
                int64_t to = pieces == 1 ? stop : smaller(stop, (from / SPLIT_KEYS + 1) * SPLIT_KEYS);
                if (plan->task)
                    plan->task[tasks] = (Task){row, offset, queries, from, to, piece ? 0 : pieces, partials};
                tasks++;
                if (pieces > 1) partials += queries * group;
                from = to;
            }
        }
    }
    plan->tasks = tasks;
    plan->task_bytes = tasks * sizeof(Task);
    plan->partial_bytes = partials * plan->kv_heads * (padded(plan->size) + 2) * sizeof(float);
#if TILES
    plan->has_tiles = has_tiles();
#endif
    plan->work = work * plan->heads * plan->size * 2;
}

#define ELEMENT float
#define PARTS 1
#define NAME(operation) operation##_float32
#include "attention_body.h"
#undef ELEMENT
#undef PARTS
#undef NAME

#define ELEMENT bfloat16
#define PARTS 2
#define NAME(operation) operation##_bfloat16
#include "attention_body.h"

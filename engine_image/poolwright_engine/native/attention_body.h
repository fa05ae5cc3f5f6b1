/* Included by attention.c once for each type of element.
 *
 * A span is what one load brings: LANES words. A word is one float32, or two bfloat16 that become a vector of the even
 * and one of the odd elements (PARTS). Sums lie in float32 in that order. Vectors are padded with zeros. */

enum { NAME(SPAN) = LANES * PARTS };
#if PARTS == 2 && defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#define SPAN NAME(SPAN)

INLINE void NAME(widen)(loose_words raw, lanes *parts) {
#if PARTS == 1
    parts[0] = (lanes)raw;
#else
    parts[0] = (lanes)(raw << 16);
    parts[1] = (lanes)(raw & 0xffff0000);
#endif
}

/* sum + a · b, by words. */
INLINE lanes NAME(multiplied)(lanes sum, loose_words a, loose_words b) {
#if PAIRED
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    lanes left[PARTS], right[PARTS];
    NAME(widen)(a, left);
    NAME(widen)(b, right);
    for (int part = 0; part < PARTS; part++) sum += left[part] * right[part];
    return sum;
#endif
}

/* A span of which `left` elements exist. */
static __attribute__((noinline)) loose_words NAME(some)(const ELEMENT *from, int64_t left) {
    loose_words span = {0};
    memcpy(&span, from, left * sizeof *from);
    return span;
}

INLINE loose_words NAME(span)(const ELEMENT *from, int64_t left) {
    return left >= SPAN ? *(const loose_words *)from : NAME(some)(from, left);
}

INLINE void NAME(store)(ELEMENT *to, int64_t left, const float *from, float scale) {
#if PARTS == 1
    loose_words span = (loose_words)(*(const loose_lanes *)from * scale);
#else
    words even = rounded(*(const loose_lanes *)from * scale);
    words odd = rounded(*(const loose_lanes *)(from + LANES) * scale);
    loose_words span = (even >> 16) | (odd & 0xffff0000);
#endif
    if (left >= SPAN) {
        *(loose_words *)to = span;
    } else {
        memcpy(to, &span, left * sizeof *to);
    }
}

/* Scores of four keys for each of `rows` query vectors, which are words too: what they are in memory. */
INLINE void NAME(score_rows)(int rows, const uint32_t *query, int64_t stride, int64_t size, const ELEMENT *const *keys,
                             float *scores) {
    lanes sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = (lanes){0};
    int64_t at = 0;
    for (; at + SPAN <= size; at += SPAN) {
        loose_words key[4];
        for (int k = 0; k < 4; k++) key[k] = *(const loose_words *)(keys[k] + at);
        for (int r = 0; r < rows; r++) {
            loose_words own = *(const loose_words *)(query + r * stride + at / PARTS);
            for (int k = 0; k < 4; k++) sums[r][k] = NAME(multiplied)(sums[r][k], own, key[k]);
        }
    }
    if (at < size) {
        loose_words key[4];
        for (int k = 0; k < 4; k++) key[k] = NAME(some)(keys[k] + at, size - at);
        for (int r = 0; r < rows; r++) {
            loose_words own = *(const loose_words *)(query + r * stride + at / PARTS);
            for (int k = 0; k < 4; k++) sums[r][k] = NAME(multiplied)(sums[r][k], own, key[k]);
        }
    }
    for (int r = 0; r < rows; r++)
        *(loose_four *)(scores + r * KEYS) = sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

/* sums += weights · values, `spans` spans from element `at` on, for each of `rows` query vectors. */
INLINE void NAME(weigh_rows)(int rows, int spans, float *sums, int64_t stride, int64_t left, const float *weights,
                             const ELEMENT *values, const int64_t *places, int64_t keys) {
    lanes own[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < spans * PARTS; i++) own[r][i] = *(loose_lanes *)(sums + r * stride + i * LANES);
    for (int64_t k = 0; k < keys; k++) {
        lanes value[4];
        for (int i = 0; i < spans; i++)
            NAME(widen)(NAME(span)(values + places[k] + i * SPAN, spans > 1 ? SPAN : left), value + i * PARTS);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < spans * PARTS; i++) own[r][i] += weights[r * KEYS + k] * value[i];
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < spans * PARTS; i++) *(loose_lanes *)(sums + r * stride + i * LANES) = own[r][i];
}

INLINE void NAME(weigh)(int rows, float *sums, int64_t stride, int64_t size, const float *weights,
                        const ELEMENT *values, const int64_t *places, int64_t keys) {
    enum { SPANS = 4 / PARTS };
    int64_t at = 0;
    for (; at + SPANS * SPAN <= size; at += SPANS * SPAN)
        NAME(weigh_rows)(rows, SPANS, sums + at, stride, SPAN, weights, values + at, places, keys);
    for (; at < size; at += SPAN)
        NAME(weigh_rows)(rows, 1, sums + at, stride, size - at, weights, values + at, places, keys);
}

/* Of a task with many query vectors, keys are turned once for all: words[word][key]. */
static void NAME(turn)(const ELEMENT *keys, const int64_t *places, int64_t low, int64_t high, int64_t size,
                       uint32_t *words) {
    for (int64_t at = 0; at < size; at += SPAN) {
        for (int64_t k = down(low, LANES); k < high; k += LANES) {
            loose_words rows[LANES] __attribute__((aligned(4 * LANES)));
            for (int i = 0; i < LANES; i++) {
                rows[i] = NAME(span)(keys + places[smaller(high - 1, larger(low, k + i))] + at, size - at);
            }
#if defined(__AVX512F__)
            transpose((const __m512i *)rows, words + at / PARTS * KEYS + k, KEYS);
#else
            for (int w = 0; w < LANES; w++)
                for (int i = 0; i < LANES; i++) words[(at / PARTS + w) * KEYS + k + i] = rows[i][w];
#endif
        }
    }
}

/* Scores of 4 · LANES turned keys for each of `rows` query vectors. */
INLINE void NAME(score_turned)(int rows, const uint32_t *query, int64_t stride, int64_t count, const uint32_t *words,
                               float *scores) {
    lanes sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = (lanes){0};
    for (int64_t w = 0; w < count; w++) {
        loose_words key[4];
        for (int k = 0; k < 4; k++) key[k] = *(const loose_words *)(words + w * KEYS + k * LANES);
        for (int r = 0; r < rows; r++) {
            loose_words own = query[r * stride + w] - (loose_words){0};
            for (int k = 0; k < 4; k++) sums[r][k] = NAME(multiplied)(sums[r][k], own, key[k]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++) *(loose_lanes *)(scores + r * KEYS + k * LANES) = sums[r][k];
}

#if PAIRED
/* Values of two keys in one word, as vdpbf16ps multiplies them, in the order of sums: words[key / 2][element]. */
static void NAME(pair)(const ELEMENT *values, const int64_t *places, int64_t low, int64_t high, int64_t size,
                       int64_t stride, uint32_t *pairs) {
    for (int64_t k = down(low, PAD); k < high; k += 2) {
        uint32_t *to = pairs + k / 2 * stride;
        int has_first = k >= low && k < high, has_second = k + 1 >= low && k + 1 < high;
        for (int64_t at = 0; at < size; at += SPAN) {
            loose_words first = {0}, second = {0};
            int64_t bytes = smaller(SPAN, size - at) * sizeof *values;
            if (bytes == sizeof first && has_first && has_second) {
                first = *(const loose_words *)(values + places[k] + at);
                second = *(const loose_words *)(values + places[k + 1] + at);
            } else {
                if (has_first) memcpy(&first, values + places[k] + at, bytes);
                if (has_second) memcpy(&second, values + places[k + 1] + at, bytes);
            }
            *(loose_words *)(to + at) = (first & 0xffff) | (second << 16);
            *(loose_words *)(to + at + LANES) = (first >> 16) | (second & 0xffff0000);
        }
    }
    int64_t end = (high + 1) / 2, padded_end = up(high, PAD) / 2;
    memset(pairs + end * stride, 0, (padded_end - end) * stride * sizeof *pairs);
}

/* Weights as bfloat16, in place: those of a query vector become the first half of their memory. */
INLINE void NAME(narrow)(float *weights, int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += LANES)
        *(__m256i_u *)((bfloat16 *)weights + k) = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + k));
}

/* sums += weights · values of pairs of keys, `parts` vectors, for each of `rows` query vectors. */
INLINE void NAME(weigh_pairs)(int rows, int parts, float *sums, int64_t stride, const float *weights,
                              const uint32_t *pairs, int64_t begin, int64_t end) {
    lanes own[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < parts; i++) own[r][i] = *(loose_lanes *)(sums + r * stride + i * LANES);
    for (int64_t k = begin; k < end; k++) {
        loose_words value[4];
        for (int i = 0; i < parts; i++) value[i] = *(const loose_words *)(pairs + k * stride + i * LANES);
        for (int r = 0; r < rows; r++) {
            loose_words weight = ((const loose_word *)(weights + r * KEYS))[k] - (loose_words){0};
            for (int i = 0; i < parts; i++) own[r][i] = NAME(multiplied)(own[r][i], weight, value[i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < parts; i++) *(loose_lanes *)(sums + r * stride + i * LANES) = own[r][i];
}

INLINE void NAME(weigh_paired)(int rows, float *sums, int64_t stride, const float *weights, const uint32_t *pairs,
                               int64_t begin, int64_t end) {
    int64_t at = 0;
    for (; at + 4 * LANES <= stride; at += 4 * LANES)
        NAME(weigh_pairs)(rows, 4, sums + at, stride, weights, pairs + at, begin, end);
    if (at < stride) NAME(weigh_pairs)(rows, 2, sums + at, stride, weights, pairs + at, begin, end);
}
#endif

#define EACH(rows, statement)                                                                                          \
    switch (rows) {                                                                                                    \
        case 1: { enum { N = 1 }; statement; break; }                                                                  \
        case 2: { enum { N = 2 }; statement; break; }                                                                  \
        case 3: { enum { N = ROWS < 3 ? ROWS : 3 }; statement; break; }                                                \
        default: { enum { N = ROWS }; statement; break; }                                                              \
    }

/* Few query vectors: keys and values as they lie. */
static void NAME(score_few)(const Block *block, const uint32_t *words, int64_t size, const ELEMENT *keys,
                            const ELEMENT *values, const int64_t *places, int64_t known, float *scores) {
    int64_t count = padded(size) / PARTS;
    for (int64_t k = down(block->low, 4); k < block->high; k += 4) {
        const ELEMENT *four_keys[4];
        for (int i = 0; i < 4; i++) {
            int64_t place = places[smaller(block->high - 1, larger(block->low, k + i))];
            int64_t ahead = places[smaller(known - 1, larger(block->low, k + i + AHEAD))];
            four_keys[i] = keys + place;
            for (int64_t at = 0; at < size; at += 64 / sizeof(ELEMENT)) {
                __builtin_prefetch(keys + ahead + at);
                __builtin_prefetch(values + place + at);
            }
        }
        for (int64_t v = block->begin; v < block->end; v += ROWS)
            EACH(block->end - v,
                 NAME(score_rows)(N, words + v * count, count, size, four_keys, scores + v * KEYS + k))
    }
}

static void NAME(weigh_few)(const Block *block, float *sums, int64_t size, const float *scores, const ELEMENT *values,
                            const int64_t *places) {
    int64_t stride = padded(size), low = block->low;
    for (int64_t v = block->begin; v < block->end; v += ROWS) {
        int64_t keys = seen_end(block, smaller(v + ROWS, block->end) - 1) - low;
        EACH(block->end - v,
             NAME(weigh)(N, sums + v * stride, stride, size, scores + v * KEYS + low, values, places + low, keys))
    }
}

/* Many: `turned` keys. */
static void NAME(score_many)(const Block *block, const uint32_t *words, int64_t size, const uint32_t *turned,
                             int in_tiles, float *scores) {
    int64_t count = padded(size) / PARTS;
#if PAIRED && TILES
    for (int64_t v = down(block->begin, PAD); v < block->end && in_tiles; v += PAD)
        for (int64_t k = down(block->low, PAD); k < seen_end(block, v + PAD - 1); k += PAD)
            multiply_tiles(scores + v * KEYS + k, KEYS, words + v * count, count, turned + k, KEYS, count, 1);
#endif
    for (int64_t k = down(block->low, 4 * LANES); k < block->high && !in_tiles; k += 4 * LANES)
        for (int64_t v = larger(block->begin, (block->base + k - block->position) * block->group); v < block->end;
             v += ROWS)
            EACH(block->end - v, NAME(score_turned)(N, words + v * count, count, (size + PARTS - 1) / PARTS,
                                                    turned + k, scores + v * KEYS + k))
}

#if PAIRED
/* And `pairs` of values; scores become bfloat16. */
static void NAME(weigh_many)(const Block *block, float *sums, int64_t stride, float *scores, const uint32_t *pairs,
                             int in_tiles) {
    int64_t first = down(block->low, PAD);
    for (int64_t v = block->begin; v < block->end; v++) NAME(narrow)(scores + v * KEYS, first, up(block->high, PAD));
#if TILES
    for (int64_t v = down(block->begin, PAD); v < block->end && in_tiles; v += PAD) {
        for (int64_t r = v; r < v + PAD; r++)
            if (r < block->begin || r >= block->end) memset(scores + r * KEYS, 0, KEYS * sizeof *scores);
        int64_t count = up(seen_end(block, v + PAD - 1) - first, PAD) / 2;
        for (int64_t at = 0; at < stride; at += PAD)
            multiply_tiles(sums + v * stride + at, stride, scores + v * KEYS + first / 2, KEYS,
                           pairs + first / 2 * stride + at, stride, count, 0);
    }
#endif
    for (int64_t v = block->begin; v < block->end && !in_tiles; v += ROWS) {
        int64_t end = (seen_end(block, smaller(v + ROWS, block->end) - 1) + 1) / 2;
        EACH(block->end - v,
             NAME(weigh_paired)(N, sums + v * stride, stride, scores + v * KEYS, pairs, block->low / 2, end))
    }
}
#endif

static void NAME(attend_task)(const Plan *plan, const Task *task, int64_t kv_head, const ELEMENT *query,
                              const ELEMENT *keys, const ELEMENT *values, ELEMENT *out) {
    int64_t size = plan->size, stride = padded(size), group = plan->heads / plan->kv_heads;
    int64_t vectors = task->queries * group, room = up(vectors, PAD), row = task->row; /* tiles take PAD vectors */
    int64_t position = plan->start[row] + task->offset; /* of the first query */
    int64_t token = plan->first[row] + task->offset;
    int64_t count = stride / PARTS; /* words of a vector */
    const int64_t *blocks = plan->blocks + plan->table[row];
    int is_many = plan->length[row] * group > SHORT_VECTORS;
    uint32_t words[room * count], turned[is_many ? count * KEYS : 1];
    float sums[room * stride], scores[room * KEYS], top[vectors], sum[vectors];
    memset(words, 0, sizeof words);
    memset(sums, 0, sizeof sums);
    for (int64_t v = 0; v < vectors; v++) {
        const ELEMENT *from = query + ((token + v / group) * plan->heads + kv_head * group + v % group) * size;
        memcpy(words + v * count, from, size * sizeof *from);
        top[v] = -INFINITY;
        sum[v] = 0;
    }
    int in_tiles = 0;
#if PAIRED
    uint32_t pairs[is_many ? KEYS / 2 * stride : 1];
#if TILES
    TileShapes shapes;
    in_tiles = is_many && plan->has_tiles;
    if (in_tiles) shape_tiles(TILE, &shapes);
#endif
#endif

    for (int64_t base = down(task->from, KEYS); base < task->to; base += KEYS) {
        int64_t low = larger(task->from, base) - base, high = smaller(task->to, base + KEYS) - base;
        int64_t places[KEYS + AHEAD], known = smaller(task->to - base, KEYS + AHEAD);
        for (int64_t k = low; k < known;) {
            int64_t block = (base + k) / plan->block_size, inside = base + k - block * plan->block_size;
            int64_t slot = blocks[block] * plan->block_size + inside;
            for (int64_t stop = smaller(known, k + plan->block_size - inside); k < stop; k++, slot++)
                places[k] = (slot * plan->kv_heads + kv_head) * size;
        }
        Block block = {base, low, high, larger(0, base + low - position) * group, vectors, position, group};
        if (plan->window) block.end = smaller(vectors, (base + high - 1 + plan->window - position) * group);

        if (is_many) {
            NAME(turn)(keys, places, low, high, size, turned);
            NAME(score_many)(&block, words, size, turned, in_tiles, scores);
        } else {
            NAME(score_few)(&block, words, size, keys, values, places, known, scores);
        }
        for (int64_t v = block.begin; v < block.end; v++) {
            int64_t seen = position + v / group + 1 - base; /* keys of the block before this are not after the query */
            int64_t from = plan->window ? larger(low, seen - plan->window) : low;
            float shrink = soften(scores + v * KEYS, down(low, PAD), up(high, PAD), from, smaller(high, seen),
                                  plan->scale, plan->soft_cap, top + v, sum + v);
            if (shrink != 1)
                for (int64_t i = 0; i < stride; i++) sums[v * stride + i] *= shrink;
        }
#if PAIRED
        if (is_many) {
            NAME(pair)(values, places, low, high, size, stride, pairs);
            NAME(weigh_many)(&block, sums, stride, scores, pairs, in_tiles);
            continue;
        }
#endif
        NAME(weigh_few)(&block, sums, size, scores, values, places);
    }

#if PAIRED && TILES
    if (in_tiles) restore_tiles(&shapes);
#endif
    for (int64_t v = 0; v < vectors; v++) {
        if (task->pieces == 1) {
            ELEMENT *to = out + ((token + v / group) * plan->heads + kv_head * group + v % group) * size;
            for (int64_t at = 0; at < size; at += SPAN)
                NAME(store)(to + at, size - at, sums + v * stride + at, 1 / sum[v]);
        } else {
            float *to = plan->partial + (task->partial * plan->kv_heads + kv_head * vectors + v) * (stride + 2);
            memcpy(to, sums + v * stride, stride * sizeof *to);
            to[stride] = top[v];
            to[stride + 1] = sum[v];
        }
    }
}

/* The pieces of some queries, this one and those after it, become their output. */
static void NAME(merge)(const Plan *plan, const Task *task, int64_t kv_head, ELEMENT *out) {
    int64_t size = plan->size, stride = padded(size), group = plan->heads / plan->kv_heads;
    int64_t vectors = task->queries * group, token = plan->first[task->row] + task->offset;
    for (int64_t v = 0; v < vectors; v++) {
        float sums[stride], top = -INFINITY, sum = 0;
        memset(sums, 0, sizeof sums);
        for (int64_t piece = 0; piece < task->pieces; piece++) {
            const float *from =
                plan->partial + (task[piece].partial * plan->kv_heads + kv_head * vectors + v) * (stride + 2);
            if (from[stride] == -INFINITY) continue; /* the query sees no key of the piece */
            float largest = from[stride] > top ? from[stride] : top;
            float shrink = exponential(top - largest), weight = exponential(from[stride] - largest);
            for (int64_t i = 0; i < stride; i++) sums[i] = sums[i] * shrink + from[i] * weight;
            sum = sum * shrink + from[stride + 1] * weight;
            top = largest;
        }
        ELEMENT *to = out + ((token + v / group) * plan->heads + kv_head * group + v % group) * size;
        for (int64_t at = 0; at < size; at += SPAN) NAME(store)(to + at, size - at, sums + at, 1 / sum);
    }
}

/* query, out: (tokens, heads, size); keys, values: (slots, kv_heads, size) of one layer; all contiguous. */
EXPORT void NAME(attend)(const Plan *plan, const ELEMENT *query, const ELEMENT *keys, const ELEMENT *values,
                         ELEMENT *out) {
    int64_t count = plan->tasks * plan->kv_heads;
#pragma omp parallel for schedule(dynamic) if (plan->work >= PARALLEL_WORK)
    for (int64_t i = 0; i < count; i++)
        NAME(attend_task)(plan, plan->task + i / plan->kv_heads, i % plan->kv_heads, query, keys, values, out);
    if (!plan->partial_bytes) return;
#pragma omp parallel for schedule(dynamic) if (plan->work >= PARALLEL_WORK)
    for (int64_t i = 0; i < count; i++) {
        const Task *task = plan->task + i / plan->kv_heads;
        if (task->pieces > 1) NAME(merge)(plan, task, i % plan->kv_heads, out);
    }
}

#undef EACH
#undef PAIRED
#undef SPAN

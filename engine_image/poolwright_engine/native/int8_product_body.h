/* Included by int8_product.c once for each type of element. */

/* One row of x to one set of levels, or two. */
static void NAME(round_row)(const int8_weight *weight, const ELEMENT *x, int8_t *levels, int32_t *zeros, float *scale) {
    int64_t size = weight->in_features;
    uint32_t largest = 0; /* as bits: what is no number counts as more than all that is */
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; i++) {
        float v = LOAD(x[i]);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float most;
    memcpy(&most, &largest, 4);
    if (!(most <= FLT_MAX)) { /* there are no levels for it, and a row with one such element has no result */
        memset(levels, 0, weight->sets * weight->size);
        memset(zeros, 0, weight->sets * sizeof *zeros);
        *scale = NAN;
        return;
    }
    float step = (most < TINY ? TINY : most) / 127;
    float inverse = 1 / step;
    int32_t sum = 0, fine_sum = 0;
    if (weight->sets == 1) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) {
            int32_t level = (int32_t)nearest(quotient(LOAD(x[i]), step, inverse));
            levels[i] = (int8_t)level;
            sum += level;
        }
        *scale = step;
    } else {
        int8_t *fine = levels + weight->size;
#pragma omp simd reduction(+ : sum, fine_sum)
        for (int64_t i = 0; i < size; i++) {
            float exact = quotient(LOAD(x[i]), step, inverse);
            float level = nearest(exact);
            int32_t part = (int32_t)nearest((exact - level) * FINE_STEPS);
            levels[i] = (int8_t)(int32_t)level;
            fine[i] = (int8_t)part;
            sum += (int32_t)level;
            fine_sum += part;
        }
        memset(fine + size, 0, weight->size - size);
        zeros[1] = ZERO * fine_sum;
        *scale = step / FINE_STEPS;
    }
    memset(levels + size, 0, weight->size - size);
    zeros[0] = ZERO * sum;
}

/* Rows of x of one panel, from `first` on: sums to elements. */
static void NAME(finish)(const int8_weight *weight, int64_t panel, const rounded_rows *x, int64_t first, int64_t rows,
                         const panel_sums *sums, ELEMENT *out) {
    const float *scales = weight->scales + panel * PANEL;
    const float *bias = weight->bias ? weight->bias + panel * PANEL : NULL;
    int64_t at = panel * PANEL;
    int64_t width = weight->out_features - at < PANEL ? weight->out_features - at : PANEL;
    for (int64_t r = first; r < first + rows; r++, sums += weight->sets) {
        const int32_t *zeros = x->zeros + r * weight->sets;
        float y[PANEL];
        if (weight->sets == 1) {
            for (int j = 0; j < PANEL; j++) y[j] = (float)(sums[0][j] - zeros[0]) * scales[j] * x->scales[r];
#if defined(__FMA__)
        } else if (weight->in_features <= EXACT_INPUTS) {
            for (int j = 0; j < PANEL; j++) {
                float both = __builtin_fmaf((float)(sums[0][j] - zeros[0]), FINE_STEPS, (float)(sums[1][j] - zeros[1]));
                y[j] = both * scales[j] * x->scales[r];
            }
#endif
        } else {
            for (int j = 0; j < PANEL; j++) {
                double both = (double)(sums[0][j] - zeros[0]) * FINE_STEPS + (double)(sums[1][j] - zeros[1]);
                y[j] = (float)both * scales[j] * x->scales[r];
            }
        }
        if (bias) {
            for (int j = 0; j < PANEL; j++) y[j] += bias[j];
        }
        ELEMENT *to = out + r * weight->out_features + at;
        if (width == PANEL) {
            for (int j = 0; j < PANEL; j++) to[j] = STORE(y[j]);
        } else {
            for (int j = 0; j < width; j++) to[j] = STORE(y[j]);
        }
    }
}

/* out = x Wᵀ + b. x: (rows, in) with adjacent elements, its rows `stride` apart; out: (rows, out) contiguous.
 * Returns whether there was memory for the levels. */
EXPORT int NAME(int8_product)(const int8_weight *weight, int64_t rows, const ELEMENT *x, int64_t stride, ELEMENT *out) {
    int64_t sets = weight->sets, size = weight->size, all = rows * sets;
    int tiled = all > VECTOR_ROWS && has_tiles();
    /* Tiles of as many rows as fill the last one best; both sets of a row in one. */
    int64_t tiles = (all + TILE_ROWS - 1) / TILE_ROWS;
    int64_t tile_rows = up((all + tiles - 1) / tiles, sets);
    int64_t held = tiled ? up(all, tile_rows) : all;
    int64_t chunk = tiled ? 2 * tile_rows : CHUNK;
    int64_t block = CACHED_BYTES / size / chunk * chunk;
    if (block < chunk) block = chunk;
    int64_t blocks = (all + block - 1) / block;

    int64_t level_bytes = up(held * size, 64), zero_bytes = up(held * 4, 64), scale_bytes = up(rows * 4, 64);
    char *memory = aligned_alloc(64, level_bytes + zero_bytes + scale_bytes);
    if (!memory) return 0;
    rounded_rows rounded = {(int8_t *)memory, (int32_t *)(memory + level_bytes),
                            (float *)(memory + level_bytes + zero_bytes)};
    memset(rounded.levels + all * size, 0, (held - all) * size);

#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_BYTES)
    for (int64_t r = 0; r < rows; r++) {
        NAME(round_row)(weight, x + r * stride, rounded.levels + r * sets * size, rounded.zeros + r * sets,
                        rounded.scales + r);
    }

#pragma omp parallel if (weight->panels * PANEL * size >= PARALLEL_BYTES)
    {
        TileShapes before;
        if (tiled) shape_tiles(tile_rows, &before);
#pragma omp for schedule(static) collapse(2) nowait
        for (int64_t b = 0; b < blocks; b++) {
            for (int64_t p = 0; p < weight->panels; p++) {
                const uint8_t *panel = weight->weights + p * PANEL * size;
                int64_t end = (b + 1) * block < all ? (b + 1) * block : all;
                for (int64_t r = b * block; r < end; r += chunk) {
                    panel_sums sums[CHUNK];
                    int64_t count = end - r < chunk ? end - r : chunk;
                    const int8_t *levels = rounded.levels + r * size;
                    if (!tiled) {
                        vector_sums(count, levels, size, panel, sums);
                    } else if (count > tile_rows) {
                        two_tile_sums(tile_rows, levels, size, panel, sums);
                    } else {
                        one_tile_sums(tile_rows, levels, size, panel, sums);
                    }
                    NAME(finish)(weight, p, &rounded, r / sets, count / sets, sums, out);
                }
            }
        }
        if (tiled) restore_tiles(&before);
    }
    free(memory);
    return 1;
}

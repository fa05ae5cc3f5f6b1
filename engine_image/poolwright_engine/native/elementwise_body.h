/* Included by elementwise.c once for each type of element. Strides are in elements: `stride` from token to token, `step`
 * from element to element of a token. */

#define ROUNDED(x) LOAD(STORE(x))

/* to[t][i] = from[t · stride + i · step], in the order in which `from` lies. */
INLINE void NAME(gather)(int64_t tokens, int64_t size, const ELEMENT *from, int64_t stride, int64_t step, float *to) {
    if (step == 1) {
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < size; i++) to[t * size + i] = LOAD(from[t * stride + i]);
    } else {
        for (int64_t i = 0; i < size; i++)
            for (int64_t t = 0; t < tokens; t++) to[t * size + i] = LOAD(from[t * stride + i * step]);
    }
}

/* hidden += added for some tokens. */
INLINE void NAME(accumulate)(int64_t tokens, int64_t size, ELEMENT *hidden, int64_t hidden_stride, const ELEMENT *added,
                             int64_t stride, int64_t step) {
    float tile[TOKENS * FEATURES];
    for (int64_t first = 0; first < size; first += FEATURES) {
        int64_t count = smaller(FEATURES, size - first);
        NAME(gather)(tokens, count, added + first * step, stride, step, tile);
        for (int64_t t = 0; t < tokens; t++) {
            ELEMENT *row = hidden + t * hidden_stride + first;
            for (int64_t i = 0; i < count; i++) row[i] = STORE(LOAD(row[i]) + tile[t * count + i]);
        }
    }
}

/* hidden += added, where something is added; out = hidden / rms(hidden) · weight.
 * hidden, out: (tokens, size) with adjacent elements; added: any strides, or NULL; weight: (size). */
EXPORT void NAME(add_norm)(int64_t tokens, int64_t size, ELEMENT *hidden, int64_t hidden_stride, const ELEMENT *added,
                           int64_t stride, int64_t step, const ELEMENT *weight, float epsilon, ELEMENT *out) {
    int64_t block = block_of(tokens, step);
#pragma omp parallel for schedule(static) if (tokens * size >= PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < tokens; first += block) {
        int64_t count = smaller(block, tokens - first);
        if (added)
            NAME(accumulate)(count, size, hidden + first * hidden_stride, hidden_stride, added + first * stride, stride,
                             step);
        for (int64_t t = first; t < first + count; t++) {
            const ELEMENT *row = hidden + t * hidden_stride;
            ELEMENT *to = out + t * size;
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < size; i++) squares += LOAD(row[i]) * LOAD(row[i]);
            float scale = 1 / sqrtf(squares / size + epsilon);
            for (int64_t i = 0; i < size; i++) to[i] = STORE(ROUNDED(LOAD(row[i]) * scale) * LOAD(weight[i]));
        }
    }
}

/* hidden += added: (tokens, size), hidden with adjacent elements. */
EXPORT void NAME(add)(int64_t tokens, int64_t size, ELEMENT *hidden, int64_t hidden_stride, const ELEMENT *added,
                      int64_t stride, int64_t step) {
    int64_t block = block_of(tokens, step);
#pragma omp parallel for schedule(static) if (tokens * size >= PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < tokens; first += block) {
        int64_t count = smaller(block, tokens - first);
        NAME(accumulate)(count, size, hidden + first * hidden_stride, hidden_stride, added + first * stride, stride, step);
    }
}

/* out = activation(gate) · up: `rows` rows of `size` adjacent elements, `stride` apart; those of out have no gaps. */
EXPORT void NAME(gated_unit)(int64_t rows, int64_t size, const ELEMENT *gate, const ELEMENT *up, int64_t stride,
                             int64_t is_gelu, ELEMENT *out) {
    int64_t parts = (size + PART - 1) / PART;
#pragma omp parallel for collapse(2) schedule(static) if (rows * size >= PARALLEL_ACTIVATIONS)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t part = 0; part < parts; part++) {
            int64_t count = smaller(PART, size - part * PART);
            const ELEMENT *g = gate + row * stride + part * PART, *u = up + row * stride + part * PART;
            ELEMENT *to = out + row * size + part * PART;
            if (is_gelu)
                for (int64_t i = 0; i < count; i++) to[i] = STORE(ROUNDED(gelu(LOAD(g[i]))) * LOAD(u[i]));
            else
                for (int64_t i = 0; i < count; i++) to[i] = STORE(ROUNDED(silu(LOAD(g[i]))) * LOAD(u[i]));
        }
    }
}

/* Splits the rows of a product into heads, norms those that are rotated where the model does so, rotates them (halves
 * paired: element i with i + size / 2), and writes keys and values where the plan says.
 * qkv: (tokens, (heads + 2 · kv_heads) · size), any strides; norm: (heads + kv_heads, size) or NULL;
 * turns: cosines then sines of each position, (positions, size) float32; query: (tokens, heads, size) contiguous;
 * keys, values: (slots, kv_heads, size) contiguous. */
EXPORT void NAME(rotate_write)(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, const ELEMENT *qkv,
                               int64_t stride, int64_t step, const ELEMENT *norm, float epsilon, const float *turns,
                               const int64_t *positions, const int64_t *slots, ELEMENT *query, ELEMENT *keys,
                               ELEMENT *values) {
    int64_t half = size / 2, rotated = heads + kv_heads;
    int64_t block = block_of(tokens, step);
#pragma omp parallel for schedule(static) if (tokens * (rotated + kv_heads) * size >= PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < tokens; first += block) {
        int64_t count = smaller(block, tokens - first);
        float tile[TOKENS * size];
        for (int64_t h = 0; h < rotated + kv_heads; h++) {
            NAME(gather)(count, size, qkv + first * stride + h * size * step, stride, step, tile);
            for (int64_t t = first; t < first + count; t++) {
                float *head = tile + (t - first) * size;
                if (h >= rotated) {
                    ELEMENT *to = values + (slots[t] * kv_heads + h - rotated) * size;
                    for (int64_t i = 0; i < size; i++) to[i] = STORE(head[i]);
                    continue;
                }
                if (norm) {
                    const ELEMENT *weight = norm + h * size;
                    float squares = 0;
#pragma omp simd reduction(+ : squares)
                    for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
                    float scale = 1 / sqrtf(squares / size + epsilon);
                    for (int64_t i = 0; i < size; i++) head[i] = ROUNDED(ROUNDED(head[i] * scale) * LOAD(weight[i]));
                }
                const float *cosines = turns + positions[t] * size, *sines = cosines + half;
                ELEMENT *to = h < heads ? query + (t * heads + h) * size : keys + (slots[t] * kv_heads + h - heads) * size;
                for (int64_t i = 0; i < half; i++) {
                    to[i] = STORE(head[i] * cosines[i] - head[i + half] * sines[i]);
                    to[i + half] = STORE(head[i + half] * cosines[i] + head[i] * sines[i]);
                }
            }
        }
    }
}

#undef ROUNDED

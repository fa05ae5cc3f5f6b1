/* Norms, gated units, rotations: one pass over the rows of a step where single operations make four to eight.
 * Results are rounded to the elements' type where the references in poolwright_kernels round. Rows are computed one by
 * one, so a row's result does not depend on the rows beside it. */

#include "element.h"

enum {
    PARALLEL_ELEMENTS = 1 << 14, /* below, waking other threads costs more than they save */
    PARALLEL_ACTIVATIONS = PARALLEL_ELEMENTS / 4, /* each costs about four other elements */
    TOKENS = 64,                 /* in a tile, where a token's elements are apart and tokens adjacent */
    FEW_TOKENS = 16,             /* in a tile of a small step, so that each thread has one */
    FEATURES = 64,
    PART = 1024 /* of a long row, what a thread takes at a time */
};

/* Tokens that are computed together: one where its own elements are adjacent. */
INLINE int64_t block_of(int64_t tokens, int64_t step) {
    return step == 1 ? 1 : (tokens >= 4 * TOKENS ? TOKENS : FEW_TOKENS);
}

INLINE float silu(float x) { return x / (1 + exponential(-x)); }

/* GELU in its tanh form, as x · sigmoid(2 · inner). */
INLINE float gelu(float x) {
    float inner = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1 + exponential(-inner));
}

#define BODY "elementwise_body.h"
#include "each_element.h"

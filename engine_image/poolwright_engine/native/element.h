/* What the operations share: elements of two types, float32 inside. Each source includes its body twice, with ELEMENT,
 * NAME and what else it needs set for one type at a time. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "two bfloat16 are read as one word, the first in its low half"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bfloat16;

INLINE float from_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* To the nearest, ties to even; NaN stays NaN. */
INLINE bfloat16 to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bfloat16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

INLINE float same_float(float x) { return x; }

/* e^x in float32 to 2 ulp, in code that compilers turn into vectors: 2^n · polynomial, as Cephes' expf has it
 * (Moshier, netlib.org/cephes). NaN stays NaN; below -87 it is 0, and above 88 it is e^88. */
INLINE float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = __builtin_rintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; } /* to a multiple */

// What a feed-forward network does to each number between its two linear maps, and the slope of that.
#pragma once

#include "gemm.h"

namespace ISA {

typedef int32_t bits __attribute__((vector_size(4 * W)));

// By their numbers in sublayers.py.
enum Activation { GELU = 0, RELU_ACTIVATION = 1 };

// exp(x) for x from -87 to 0: 2^n e^r, where r is at most half of log 2.
static inline vec exp_of_negative(vec x) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number, in the last bits
    const vec shifted = x * 1.44269504f + shift, n = shifted - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return (vec)((bits)sum + (((bits)shifted - (bits)shift) << 23));
}

// The share of a normal distribution below x, to 2e-7; nothing where it is less.
static inline vec share_below(vec x) {
    constexpr float END = 5.54f;
    const vec most = (x > END) ? all(END) : x, square = most * most;
    vec above = square * 2.2504436e-08f + 6.3521893e-06f;
    above = above * square + 0.00017075583f;
    above = above * square + 0.0046887225f;
    above = above * square + 0.03405527f;
    above = above * square + 0.39894223f;
    vec under = square * 1.1903757e-06f + 7.4198346e-05f;
    under = under * square + 0.0018953918f;
    under = under * square + 0.028759377f;
    under = under * square + 0.25202975f;
    under = under * square + 1.0f;
    return (x < -END) ? vec{} : most * (above / under) + 0.5f;
}

// Its slope: the bell.
static inline vec bell(vec x) {
    const vec down = x * x * -0.5f;
    return exp_of_negative((down < -87.0f) ? all(-87.0f) : down) * 0.3989422804f;
}

// h to its value in place, and to slope where that is wanted; count is a multiple of W.
static void activate(Activation activation, float *h, float *slope, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i += W) {
        const vec x = load(h + i);
        vec value, by{};
        if (activation == GELU) {
            const vec share = share_below(x);
            value = x * share;
            if (slope) by = share + x * bell(x);
        } else {
            value = (vec{} > x) ? vec{} : x;  // a NaN stays one
            by = (x > vec{}) ? all(1) : vec{};
        }
        store(h + i, value);
        if (slope) store(slope + i, by);
    }
}

}  // namespace ISA

// The feature maps.
#pragma once

#include "gemm.h"

namespace ISA {

// Feature maps, by their numbers in native_backend.py; and none, for what was mapped before.
enum Map { AS_IT_IS = -1, RELU_EPS = 0, RELU = 1, SQUARED_RELU = 2 };

template <int MAP>
struct Phi {
    static inline vec of(vec x) {
        if (MAP == AS_IT_IS) return x;
        const vec positive = (vec{} > x) ? vec{} : x;  // a NaN stays one
        if (MAP == RELU_EPS) return positive + 1e-3f;
        return MAP == RELU ? positive : positive * positive;
    }
    static inline float of(float x) {
        if (MAP == AS_IT_IS) return x;
        const float positive = 0 > x ? 0 : x;
        if (MAP == RELU_EPS) return positive + 1e-3f;
        return MAP == RELU ? positive : positive * positive;
    }
    // The gradient of x, from that of its feature.
    static inline vec back(vec x, vec d) {
        const vec slope = MAP == SQUARED_RELU ? x + x : all(1);
        return (x <= vec{}) ? vec{} : d * slope;
    }
    static inline float back(float x, float d) { return x <= 0 ? 0 : MAP == SQUARED_RELU ? 2 * x * d : d; }
};

// The features of a row; nothing is read or written behind it.
template <int MAP>
static inline void map_row(const float *x, float *f, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(f + i, Phi<MAP>::of(load(x + i)));
    for (; i < n; i++) f[i] = Phi<MAP>::of(x[i]);
}

// The gradients of its numbers; nothing is read or written behind them.
template <int MAP>
static inline void back_row(const float *x, const float *d, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, Phi<MAP>::back(load(x + i), load(d + i)));
    for (; i < n; i++) to[i] = Phi<MAP>::back(x[i], d[i]);
}

}  // namespace ISA

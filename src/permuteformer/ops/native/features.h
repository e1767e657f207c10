// Features of tokens: rotated along the cycles of a permutation, through the feature map, hidden where a mask says so.
#pragma once

#include "call.h"
#include "gemm.h"

namespace ISA {

// Feature maps, by their numbers in native_backend.py.
enum Map { RELU_EPS = 0, RELU = 1, SQUARED_RELU = 2 };

template <int MAP>
struct Phi {
    static inline vec of(vec x) {
        const vec positive = (x <= vec{}) ? vec{} : x;  // a NaN stays one
        if (MAP == RELU_EPS) return positive + 1e-3f;
        return MAP == RELU ? positive : positive * positive;
    }
    static inline float of(float x) {
        const float positive = x <= 0 ? 0 : x;
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


// How far every cycle is turned at the token at hand. Positions mostly go on by one, so that a division is rare.
struct Turn {
    const Cycle *cycles;
    int32_t count;
    int64_t *shift, *last;  // of each cycle

    void start() {
        for (int32_t c = 0; c < count; c++) shift[c] = last[c] = 0;
    }
    void to(const int64_t *position) {
        for (int32_t c = 0; c < count; c++) {
            const int64_t length = cycles[c].length, here = position[cycles[c].axis];
            int64_t step, s;
            if (__builtin_sub_overflow(here, last[c], &step) || __builtin_add_overflow(shift[c], step, &s) || s < 0 || s > length) {
                s = here % length;
                if (s < 0) s += length;
            } else if (s == length) {
                s = 0;
            }
            shift[c] = s;
            last[c] = here;
        }
    }
};

template <int MAP>
static inline void map_run(const float *from, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, Phi<MAP>::of(load(from + i)));
    for (; i < n; i++) to[i] = Phi<MAP>::of(from[i]);
}

template <int MAP>
static inline void back_run(const float *x, const float *d, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, Phi<MAP>::back(load(x + i), load(d + i)));
    for (; i < n; i++) to[i] = Phi<MAP>::back(x[i], d[i]);
}

// Features of one token, m of them.
template <int MAP>
static inline void features(const float *x, float *to, ptrdiff_t m, const Turn &turn) {
    if (turn.count == 0) return map_run<MAP>(x, to, m);
    for (int32_t c = 0; c < turn.count; c++) {
        const ptrdiff_t begin = turn.cycles[c].begin, length = turn.cycles[c].length, s = turn.shift[c];
        map_run<MAP>(x + begin + s, to + begin, length - s);
        map_run<MAP>(x + begin, to + begin + length - s, s);
    }
}

// The gradient of a token, from that of its features: turned back.
template <int MAP>
static inline void features_back(const float *x, const float *d, float *to, ptrdiff_t m, const Turn &turn) {
    if (turn.count == 0) return back_run<MAP>(x, d, to, m);
    for (int32_t c = 0; c < turn.count; c++) {
        const ptrdiff_t begin = turn.cycles[c].begin, length = turn.cycles[c].length, s = turn.shift[c];
        back_run<MAP>(x + begin + s, d + begin, to + begin + s, length - s);
        back_run<MAP>(x + begin, d + begin + length - s, to + begin, s);
    }
}

}  // namespace ISA

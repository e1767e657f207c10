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


// How far a cycle is turned at the token at hand. Positions mostly go on by one, so that a division is rare.
struct Turn {
    int64_t length, shift, last;

    Turn() = default;
    explicit Turn(const Cycle &cycle) : length(cycle.length), shift(0), last(0) {}
    int64_t to(int64_t position) {
        int64_t step, s;
        if (__builtin_sub_overflow(position, last, &step) || __builtin_add_overflow(shift, step, &s) || s < 0 || s > length) {
            s = position % length;
            if (s < 0) s += length;
        } else if (s == length) {
            s = 0;
        }
        last = position;
        return shift = s;
    }
};

// Place i of a cycle of n, turned by shift.
static inline ptrdiff_t turned(ptrdiff_t i, ptrdiff_t shift, ptrdiff_t n) { return i + shift < n ? i + shift : i + shift - n; }

// The n features of a cycle, turned by shift. Whole vectors are written: what is behind the n is overwritten by whoever owns it, and the one in
// which the cycle begins again is written twice, so that the loop does not depend on where that is. With `careful` nothing is read behind the n.
template <int MAP>
static inline void map_cycle(const float *from, float *to, ptrdiff_t n, ptrdiff_t shift, bool careful) {
    if (careful) {
        for (ptrdiff_t i = 0; i < n; i++) to[i] = Phi<MAP>::of(from[turned(i, shift, n)]);
        return;
    }
    for (ptrdiff_t i = 0; i < n; i += W) store(to + i, Phi<MAP>::of(load(from + turned(i, shift, n))));
    store(to + n - shift, Phi<MAP>::of(load(from)));
}

// The gradients of the n numbers of a cycle, from those of their features; the same, turned back.
template <int MAP>
static inline void back_cycle(const float *x, const float *d, float *to, ptrdiff_t n, ptrdiff_t shift, bool careful) {
    const ptrdiff_t back = n - shift;
    if (careful) {
        for (ptrdiff_t i = 0; i < n; i++) to[i] = Phi<MAP>::back(x[i], d[turned(i, back, n)]);
        return;
    }
    for (ptrdiff_t i = 0; i < n; i += W) store(to + i, Phi<MAP>::back(load(x + i), load(d + turned(i, back, n))));
    store(to + shift, Phi<MAP>::back(load(x + shift), load(d)));
}

// The same of n numbers that are not turned. Nothing is read or written behind them.
template <int MAP>
static inline void back_row(const float *x, const float *d, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, Phi<MAP>::back(load(x + i), load(d + i)));
    for (; i < n; i++) to[i] = Phi<MAP>::back(x[i], d[i]);
}

}  // namespace ISA

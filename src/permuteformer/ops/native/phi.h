// Features of tokens: rotated along the cycles of a permutation, through the feature map, hidden where a mask says so.
#pragma once

#include "call.h"
#include "gemm.h"

namespace ISA {

// Feature maps, by their numbers in native_backend.py; and none, for what was mapped before.
enum Map { AS_IT_IS = -1, RELU_EPS = 0, RELU = 1, SQUARED_RELU = 2 };

template <int MAP>
struct Phi {
    template <typename Vector>
    static inline Vector of(Vector x) {
        if (MAP == AS_IT_IS) return x;
        const Vector positive = (x <= Vector{}) ? Vector{} : x;  // a NaN stays one
        if (MAP == RELU_EPS) return positive + 1e-3f;
        return MAP == RELU ? positive : positive * positive;
    }
    static inline float of(float x) {
        if (MAP == AS_IT_IS) return x;
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


// How far a piece is turned at the token at hand. Positions mostly go on by one, so that a division is rare.
struct Turn {
    int64_t shift = 0, last = 0;

    int64_t to(int64_t position, int64_t length) {
        const uint64_t step = static_cast<uint64_t>(position) - static_cast<uint64_t>(last);
        if (step > 1) {
            shift = position % length;
            return shift += shift < 0 ? length : 0;
        }
        shift += step;
        return shift = shift == length ? 0 : shift;
    }
};

// Tokens side by side at each of which a piece is turned by a step more, 0 or 1, than at the one before.
struct Run {
    ptrdiff_t tokens, period, shift, step;

    // Calls one(token, shift) for each; returns the last shift.
    template <typename One>
    inline ptrdiff_t each(One one) const {
        ptrdiff_t now = shift;
        for (ptrdiff_t t = 0;;) {
            one(t, now);
            if (++t == tokens) return now;
            now += step;
            now = now == period ? 0 : now;
        }
    }
};

#if defined(__AVX2__)
typedef float eight __attribute__((vector_size(32)));
typedef float loose_eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int eight_places __attribute__((vector_size(32)));
typedef int loose_eight_places __attribute__((vector_size(32), aligned(4), may_alias));
#endif

// Several short cycles that together are no longer than a row of the table, mapped and turned, or turned back. Eight numbers are read and written, as
// below, where there is an instruction that shuffles as many.
template <int MAP, bool BACK>
static inline ptrdiff_t turn_lanes(const Run &run, const int32_t *lanes, ptrdiff_t size, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
    return run.each([=](ptrdiff_t t, ptrdiff_t shift) {
        const int32_t *places = lanes + LANES * (BACK && shift ? run.period - shift : shift);
        const float *from = x + t * x_row;
        float *to = y + t * y_row;
#if defined(__AVX2__)
        (void)size;
        const eight turned = __builtin_ia32_permvarsf256(*reinterpret_cast<const loose_eight *>(from),
                                                         *reinterpret_cast<const loose_eight_places *>(places));
        *reinterpret_cast<loose_eight *>(to) = Phi<MAP>::of(turned);
#else
        for (ptrdiff_t i = 0; i < size; i++) to[i] = Phi<MAP>::of(from[places[i]]);
#endif
    });
}

// Place i of a cycle of n, turned by shift; without a branch, since where the cycle begins again is not to be foreseen.
static inline ptrdiff_t turned(ptrdiff_t i, ptrdiff_t shift, ptrdiff_t n) { return i + shift - (n & -static_cast<ptrdiff_t>(i + shift >= n)); }

// A cycle of V vectors (0: any number), mapped and turned, or turned back. Whole vectors are read and written: behind the last cycle there must be
// room for one, what is behind the others is overwritten by whoever owns it, and the vector in which a cycle begins again is written twice, so
// that the loop does not depend on where that is.
template <int MAP, bool BACK, int V>
static inline ptrdiff_t turn_vectors(const Run &run, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
    const ptrdiff_t n = run.period, vectors = V ? V : (n + W - 1) / W;
    return run.each([=](ptrdiff_t t, ptrdiff_t shift) {
        const ptrdiff_t by = BACK ? n - shift : shift;
        const float *from = x + t * x_row;
        float *to = y + t * y_row;
        for (ptrdiff_t i = 0; i < vectors; i++) store(to + i * W, Phi<MAP>::of(load(from + turned(i * W, by, n))));
        store(to + n - by, Phi<MAP>::of(load(from)));
    });
}

template <int MAP, bool BACK>
static inline ptrdiff_t turn(const Run &run, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
    switch ((run.period + W - 1) / W) {
    case 1: return turn_vectors<MAP, BACK, 1>(run, x, x_row, y, y_row);
    case 2: return turn_vectors<MAP, BACK, 2>(run, x, x_row, y, y_row);
    case 3: return turn_vectors<MAP, BACK, 3>(run, x, x_row, y, y_row);
    case 4: return turn_vectors<MAP, BACK, 4>(run, x, x_row, y, y_row);
    default: return turn_vectors<MAP, BACK, 0>(run, x, x_row, y, y_row);
    }
}

// The features of a row, not turned; nothing is read behind it.
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

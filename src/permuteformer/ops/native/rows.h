// Operations on rows of floats, and the feature maps.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "arena.h"
#include "gemm.h"

namespace ISA {

static inline void zero(float *p, ptrdiff_t n) { std::memset(p, 0, n * sizeof(float)); }

static inline void copy_row(const float *from, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = from[i];
}

static inline void add_row(const float *from, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(to + i) + load(from + i));
    for (; i < n; i++) to[i] += from[i];
}

static inline float dot(const float *a, const float *b, ptrdiff_t n) {
    vec total[4] = {};
    ptrdiff_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) total[j] += load(a + i + j * W) * load(b + i + j * W);
    for (; i + W <= n; i += W) total[0] += load(a + i) * load(b + i);
    float result = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < n; i++) result += a[i] * b[i];
    return result;
}

// n is a multiple of W in the functions below.

static inline float sum_row(const float *x, ptrdiff_t n) {
    vec total{};
    for (ptrdiff_t i = 0; i < n; i += W) total += load(x + i);
    return sum(total);
}

static inline void add_scaled(float *to, const float *x, float scale, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += W) store(to + i, load(to + i) + all(scale) * load(x + i));
}

static inline void scale(float *x, float by, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += W) store(x + i, load(x + i) * all(by));
}

static inline void scaled(const float *x, float by, float *to, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += W) store(to + i, load(x + i) * all(by));
}

// Adds the weighted sum of rows to the total. Summing the rows first loses less precision in long sequences.
template <typename Weight>
static void add_rows(float *total, const float *f, ptrdiff_t f_row, ptrdiff_t rows, ptrdiff_t n, Weight weight) {
    for (ptrdiff_t j = 0; j < n; j += W) {
        vec some{};
        for (ptrdiff_t i = 0; i < rows; i++) some += load(f + i * f_row + j) * all(weight(i));
        store(total + j, load(total + j) + some);
    }
}

#if defined(__AVX2__)
// Transposes 8 x 8 floats.
static inline void transpose_8x8(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row) {
    __m256 x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps(from + i * from_row);
    for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
            x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}
#endif

// Transposes rows x columns into panels.
static void transpose(const float *from, ptrdiff_t from_row, ptrdiff_t rows, ptrdiff_t columns, Matrix to) {
    ptrdiff_t done = 0;
#if defined(__AVX2__)
    for (; done + 8 <= rows; done += 8) {
        float *first = to.data + done / PANEL * to.panel + done % PANEL;
        ptrdiff_t j = 0;
        for (; j + 8 <= columns; j += 8) transpose_8x8(from + done * from_row + j, from_row, first + j * to.row, to.row);
        for (; j < columns; j++)
            for (int i = 0; i < 8; i++) first[j * to.row + i] = from[(done + i) * from_row + j];
    }
#endif
    for (ptrdiff_t i = done; i < rows; i++) {
        float *column = to.data + i / PANEL * to.panel + i % PANEL;
        const float *row = from + i * from_row;
        for (ptrdiff_t j = 0; j < columns; j++) column[j * to.row] = row[j];
    }
}

// The feature maps, by their numbers in native_backend.py; and the identity, for rows that were mapped before.
enum Map { AS_IT_IS = -1, RELU_EPS = 0, RELU = 1, SQUARED_RELU = 2 };

template <int MAP>
struct Phi {
    template <typename T>
    static inline T of(T x) {
        if (MAP == AS_IT_IS) return x;
        const T positive = (T{} > x) ? T{} : x;  // a NaN stays one
        if (MAP == RELU_EPS) return positive + 1e-3f;
        return MAP == RELU ? positive : positive * positive;
    }
    // The gradient of x, from that of its feature.
    template <typename T>
    static inline T back(T x, T d) {
        return (x <= T{}) ? T{} : MAP == SQUARED_RELU ? d * (x + x) : d;
    }
};

// The features of a row; nothing behind it is read or written.
template <int MAP>
static inline void map_row(const float *x, float *f, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) store(f + i, Phi<MAP>::of(load(x + i)));
    for (; i < n; i++) f[i] = Phi<MAP>::of(x[i]);
}

// The gradients of a row, set or added; nothing behind it is read or written.
template <int MAP, bool ADD_TO = false>
static inline void back_row(const float *x, const float *d, float *to, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) {
        const vec found = Phi<MAP>::back(load(x + i), load(d + i));
        store(to + i, ADD_TO ? load(to + i) + found : found);
    }
    for (; i < n; i++) to[i] = (ADD_TO ? to[i] : 0) + Phi<MAP>::back(x[i], d[i]);
}

}  // namespace ISA

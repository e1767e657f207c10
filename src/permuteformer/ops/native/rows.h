// What is done to rows of numbers.
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

static inline float dot(const float *a, const float *b, ptrdiff_t n) {
    vec total[4] = {};
    ptrdiff_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) total[j] += load(a + i + j * W) * load(b + i + j * W);
    for (; i + W <= n; i += W) total[0] += load(a + i) * load(b + i);
    float all_of_them = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < n; i++) all_of_them += a[i] * b[i];
    return all_of_them;
}

static inline float sum_row(const float *x, ptrdiff_t n) {  // n a multiple of W
    vec total{};
    for (ptrdiff_t i = 0; i < n; i += W) total += load(x + i);
    return sum(total);
}

static inline void add_scaled(float *to, const float *x, float scale, ptrdiff_t n) {  // n a multiple of W
    for (ptrdiff_t i = 0; i < n; i += W) store(to + i, load(to + i) + all(scale) * load(x + i));
}

// The rows of f, each by its weight, added up on their own and then to the total: of long sequences, less is lost so.
template <typename Weight>
static void add_rows(float *total, const float *f, ptrdiff_t f_row, ptrdiff_t rows, ptrdiff_t n, Weight weight) {
    for (ptrdiff_t j = 0; j < n; j += W) {
        vec some{};
        for (ptrdiff_t i = 0; i < rows; i++) some += load(f + i * f_row + j) * all(weight(i));
        store(total + j, load(total + j) + some);
    }
}

static inline void scale(float *x, float by, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += W) store(x + i, load(x + i) * all(by));
}

// rows x columns to its transpose, panel by panel.
static void transpose(const float *from, ptrdiff_t from_row, ptrdiff_t rows, ptrdiff_t columns, Matrix to) {
    for (ptrdiff_t i = 0; i < rows; i++) {
        float *column = to.data + i / PANEL * to.panel + i % PANEL;
        const float *row = from + i * from_row;
        for (ptrdiff_t j = 0; j < columns; j++) column[j * to.row] = row[j];
    }
}

}  // namespace ISA

// Products of small matrices in cache, on the vectors of one instruction set. Included once for each; see isa.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ISA {

using std::ptrdiff_t;

// Numbers of a vector, and how many of them are added up at once: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int W = 4, ROWS = 6, VECTORS = 4;
#else
constexpr int W = 4, ROWS = 6, VECTORS = 2;
#endif

constexpr int PANEL = W * VECTORS;
// Rows of B that stay in the first cache while rows of A pass by.
constexpr int DEPTH = 16384 / (4 * PANEL) < 64 ? 64 : 16384 / (4 * PANEL);

typedef float vec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));

static inline vec load(const float *p) { return *reinterpret_cast<const loose *>(p); }
static inline void store(float *p, vec x) { *reinterpret_cast<loose *>(p) = x; }
static inline vec all(float x) {  // not 0 + x, which would be an addition
#if defined(__AVX512F__)
    return vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif defined(__AVX2__)
    return vec{x, x, x, x, x, x, x, x};
#else
    return vec{x, x, x, x};
#endif
}
static inline float sum(vec x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 half = _mm512_castps512_ps256((__m512)x) + _mm512_extractf32x8_ps((__m512)x, 1);
#else
    const __m256 half = (__m256)x;
#endif
    __m128 part = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
    part += _mm_movehl_ps(part, part);
    return part[0] + part[1];
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}
static inline ptrdiff_t padded(ptrdiff_t n) { return (n + W - 1) / W * W; }

// A matrix whose columns are in panels: element (i, n) is at data[n / PANEL * panel + i * row + n % PANEL].
// By rows: panel = PANEL. Panel by panel: row = PANEL, panel = rows * PANEL.
struct Matrix {
    float *data;
    ptrdiff_t row, panel;
};

// Prefetches the rows that are read next, a few cache lines at a time between products: the rows of a head are too far apart for the
// processor's own prefetcher.
struct Ahead {
    struct Rows {
        const float *x;
        ptrdiff_t token, numbers;
    };
    static constexpr ptrdiff_t LINE = 64;

    Rows of[5] = {};
    int count = 0, at = 0;
    int64_t rows = 0, row = 0, pace = 0;
    ptrdiff_t place = 0;

    Ahead() = default;
    template <typename... More>
    explicit Ahead(int64_t rows, More... more) : of{more...}, count(sizeof...(more)), rows(rows) {}

    // Divides the rows over this number of calls of some().
    void share_out(int64_t calls) {
        int64_t lines = 0;
        for (int n = 0; n < count; n++) lines += rows * ((4 * of[n].numbers + LINE - 1) / LINE);
        pace = (lines + calls - 1) / calls;
    }
    void some() {
        for (int64_t n = 0; n < pace && at < count; n++) {
            __builtin_prefetch(reinterpret_cast<const char *>(of[at].x + row * of[at].token) + place, 0, 2);
            if ((place += LINE) < 4 * of[at].numbers) continue;
            place = 0;
            if (++row == rows) row = 0, at++;
        }
    }
};

// The term added to a product: nothing, the current content, or one row for all.
struct To {
    bool there;
    const float *row = nullptr;

    To(bool there) : there(there) {}
    To(const float *row) : there(false), row(row) {}
};
constexpr bool ADD = true, NEW = false;

// C = A B + to, M x V vectors of it; `to` may be null. It is added last: adding products one by one to a large sum would lose digits.
template <int M, int V>
static inline void tile(ptrdiff_t depth, const float *a, ptrdiff_t a_row, ptrdiff_t a_column, const float *b, ptrdiff_t b_row, float *c,
                        ptrdiff_t c_row, const float *to, ptrdiff_t to_row) {
    vec total[M][V];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) total[i][j] = vec{};
#pragma GCC unroll 4
    for (ptrdiff_t k = 0; k < depth; k++) {
        vec right[V];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) right[j] = load(b + k * b_row + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            const vec left = all(a[i * a_row + k * a_column]);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) total[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) store(c + i * c_row + j * W, to ? total[i][j] + load(to + i * to_row + j * W) : total[i][j]);
}

template <int V>
static void tiles(ptrdiff_t rows, ptrdiff_t depth, const float *a, ptrdiff_t a_row, ptrdiff_t a_column, const float *b, ptrdiff_t b_row,
                  float *c, ptrdiff_t c_row, const float *to, ptrdiff_t to_row, Ahead &ahead) {
    ptrdiff_t i = 0;
    for (; i + ROWS <= rows; i += ROWS) {
        ahead.some();
        tile<ROWS, V>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, to ? to + i * to_row : nullptr, to_row);
    }
    a += i * a_row;
    c += i * c_row;
    to = to ? to + i * to_row : nullptr;
    switch (rows - i) {
    case 1: return tile<1, V>(depth, a, a_row, a_column, b, b_row, c, c_row, to, to_row);
    case 2: return tile<2, V>(depth, a, a_row, a_column, b, b_row, c, c_row, to, to_row);
    case 3: return tile<3, V>(depth, a, a_row, a_column, b, b_row, c, c_row, to, to_row);
    case 4: return tile<4, V>(depth, a, a_row, a_column, b, b_row, c, c_row, to, to_row);
    case 5: return tile<5, V>(depth, a, a_row, a_column, b, b_row, c, c_row, to, to_row);
    }
}

// C = A B, and what that is added to: rows x depth times depth x columns, where columns are a multiple of W. A has any strides, so it may be
// transposed.
static void multiply(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const float *a, ptrdiff_t a_row, ptrdiff_t a_column, Matrix b,
                     Matrix c, To to, Ahead &&ahead = Ahead()) {
    const ptrdiff_t panels = (columns + PANEL - 1) / PANEL, depths = depth > DEPTH ? (depth + DEPTH - 1) / DEPTH : 1;
    ahead.share_out(panels * depths * (rows < ROWS ? 1 : rows / ROWS));
    for (ptrdiff_t n = 0; n < columns; n += PANEL) {
        const float *right = b.data + n / PANEL * b.panel;
        float *out = c.data + n / PANEL * c.panel;
        const ptrdiff_t vectors = (columns - n < PANEL ? columns - n : PANEL) / W;
        for (ptrdiff_t k = 0; k < depth || k == 0; k += DEPTH) {
            const ptrdiff_t some = depth - k < DEPTH ? depth - k : DEPTH;
            const float *left = a + k * a_column, *under = right + k * b.row;
            const bool there = to.there || k > 0;
            const float *on = there ? out : to.row ? to.row + n : nullptr;
            const ptrdiff_t on_row = there ? c.row : 0;
            switch (vectors) {
            case 1: tiles<1>(rows, some, left, a_row, a_column, under, b.row, out, c.row, on, on_row, ahead); break;
            case 2: tiles<2>(rows, some, left, a_row, a_column, under, b.row, out, c.row, on, on_row, ahead); break;
            case 3: tiles<3>(rows, some, left, a_row, a_column, under, b.row, out, c.row, on, on_row, ahead); break;
            default: tiles<VECTORS>(rows, some, left, a_row, a_column, under, b.row, out, c.row, on, on_row, ahead); break;
            }
        }
    }
}

}  // namespace ISA

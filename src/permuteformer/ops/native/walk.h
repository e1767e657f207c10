// The tokens of a row: which are real, their positions, and the features of a block of them.
#pragma once

#include <algorithm>

#include "turn.h"

namespace ISA {

enum Side { KEYS, QUERIES };

constexpr int64_t RUN = 32;  // tokens rotated together at most: their rows stay in the first-level cache

// Tokens t … stop: real, with rows and positions at constant steps.
struct Span {
    int64_t t, stop, row, row_step, count;
    Run run;

    // The rows of x at these tokens, as if they began at token 0.
    Rows of(Rows x) const { return {x.at(row), x.token * row_step}; }
};

// Walks along the tokens of one row of the batch, a block at a time. Token t is row order[t] of the tensors, or row t without an order.
class Walk {
    const uint8_t *mask, *global_mask;
    const int64_t *positions, *order;
    int64_t stride, axes, length;
    int64_t count;  // the position of the next real token, where positions are counted
    Span *spans;
    int64_t *steps;
    int64_t found = 0;

  public:
    Walk(const Call &call, int64_t b, Side side, int32_t axes, Arena &arena, const int64_t *order = nullptr)
        : order(order), axes(axes), length(side == QUERIES ? call.queries : call.length), spans(arena.take<Span>(BLOCK)), steps(arena.take<int64_t>(BLOCK * axes)) {
        const bool apart = side == QUERIES && call.query_positions.data;
        const Positions &given = apart ? call.query_positions : call.positions;
        mask = call.mask && !apart ? call.mask + b * call.length : nullptr;
        global_mask = call.global_mask ? call.global_mask + b * call.length : nullptr;
        positions = given.data ? given.data + b * given.batch : nullptr;
        stride = given.token;
        count = call.start ? call.start[b] : 0;
    }
    int64_t row(int64_t t) const { return order ? order[t] : t; }
    bool is_masked(int64_t t) const { return mask && !mask[row(t)]; }
    bool is_global(int64_t t) const { return global_mask && global_mask[row(t)]; }
    // Whether token t is real and takes part in the walk: global tokens are handled apart.
    bool is_real(int64_t t) const { return !is_masked(t) && !is_global(t); }
    // Whether a vector that begins in a row of the span may end behind the last row of a tensor with this stride.
    bool is_near_end(const Span &span, int64_t token) const {
        const int64_t last = std::max(span.row, span.row + (span.run.tokens - 1) * span.row_step);
        return (length - 1 - last) * token < W;
    }

    void count_from(int64_t position) { count = position; }
    // Skips tokens begin … end, and counts the real ones.
    void skip(int64_t begin, int64_t end) {
        if (!mask) count += end - begin;
        for (int64_t t = begin; mask && t < end; t++) count += !is_masked(t);
    }
    // Finds the spans of the block begin … end, which follows the tokens counted so far.
    void look(int64_t begin, int64_t end) {
        found = 0;
        for (int64_t t = begin; t < end;) {
            if (!is_real(t)) {
                count += !is_masked(t++);
                continue;
            }
            Span &span = spans[found];
            int64_t *step = steps + found++ * axes;
            span.t = t, span.row = row(t), span.row_step = t + 1 < end ? row(t + 1) - row(t) : 1, span.count = count;
            span.stop = run_end(t, t + RUN < end ? t + RUN : end, span.row_step);
            span.run = {span.stop - t, positions ? positions + span.row * stride : &span.count, step};
            for (int64_t a = 0; a < axes; a++) step[a] = span.stop - t == 1 ? 0 : positions ? position(t + 1, a) - position(t, a) : 1;
            count += span.stop - t;
            t = span.stop;
        }
    }
    const Span *begin() const { return spans; }
    const Span *end() const { return spans + found; }

  private:
    int64_t position(int64_t t, int64_t axis) const { return positions[row(t) * stride + axis]; }
    // The end of the run of tokens that begins at t: real, rows a constant step apart, positions at constant steps of 0 or 1.
    int64_t run_end(int64_t t, int64_t end, int64_t row_step) const {
        int64_t stop = t + 1;
        for (; stop < end && is_real(stop) && row(stop) - row(stop - 1) == row_step; stop++)
            for (int64_t a = 0; positions && a < axes; a++) {
                const uint64_t step = static_cast<uint64_t>(position(stop, a)) - static_cast<uint64_t>(position(stop - 1, a));
                if (step > 1 || position(t + 1, a) - position(t, a) != static_cast<int64_t>(step)) return stop;
            }
        return stop;
    }
};

// Sizes of a head's buffers. Rows of features are one vector longer than needed: rows a power of two apart would share cache sets.
struct Sizes {
    ptrdiff_t m, d, mp, dp, f_row, v_row;

    explicit Sizes(const Call &call) : m(call.features), d(call.values), mp(padded(m)), dp(padded(d)), f_row(mp + W), v_row(dp) {}
    Matrix rows(float *data, ptrdiff_t row) const { return {data, row, PANEL}; }
    Matrix panels(float *data, ptrdiff_t rows) const { return {data, PANEL, rows * PANEL}; }
    // Panels of a block of tokens as columns. A single panel is no wider than the block, so that it stays in the first-level cache.
    Matrix panels(float *data, ptrdiff_t rows, ptrdiff_t tokens) const {
        return tokens < PANEL ? Matrix{data, padded(tokens), 0} : panels(data, rows);
    }
    static ptrdiff_t panel_size(ptrdiff_t rows, ptrdiff_t columns) { return rows * ((columns + PANEL - 1) / PANEL) * PANEL; }
    float *run_rows(Arena &arena) const { return arena.zeros<float>(RUN * f_row); }
};

// A state m x d and m, between the caller's tensors and padded buffers. A null source is zero.
static inline void load_state(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; kv && i < s.m; i++) copy_row(kv + i * s.d, to_kv + i * s.dp, s.d);
    if (z) copy_row(z, to_z, s.m);
}

static inline void store_state(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; i < s.m; i++) copy_row(kv + i * s.dp, to_kv + i * s.d, s.d);
    copy_row(z, to_z, s.m);
}

// Where rows are: in a tensor of the caller, where nothing beyond them may be read or written; or in a buffer with a spare vector.
enum Place { FAR, NEAR };

// The features of tokens begin … end of x, one row each; zero for tokens that are not real. Rows at the end of a tensor are mapped to `near`
// first, a few rows with room behind them.
template <int MAP, Place PLACE>
static void fill(const Sizes &s, const Walk &walk, Turner &turner, float *near, Rows x, int64_t begin, int64_t end, float *f) {
    f -= begin * s.f_row;
    for (const Span &span : walk) {
        float *to = f + span.t * s.f_row;
        const Rows rows = span.of(x);
        if (turner.turns_nothing()) {
            for (int64_t i = 0; i < span.run.tokens; i++) map_row<MAP>(rows.at(i), to + i * s.f_row, s.m);
        } else if (PLACE == NEAR || !walk.is_near_end(span, x.token)) {
            turner.rows<MAP, false>(span.run, rows.x, rows.token, to, s.f_row);
        } else {
            for (int64_t i = 0; i < span.run.tokens; i++) map_row<MAP>(rows.at(i), near + i * s.f_row, s.m);
            turner.rows<AS_IT_IS, false>(span.run, near, s.f_row, to, s.f_row);
        }
    }
    for (int64_t t = begin; t < end; t++) {
        const ptrdiff_t known = walk.is_real(t) ? s.m : 0;
        if (known < s.mp) zero(f + t * s.f_row + known, s.mp - known);
    }
}

static void fill_values(const Sizes &s, const Walk &walk, Rows x, int64_t begin, int64_t end, float *v) {
    for (int64_t t = begin; t < end; t++, v += s.v_row) {
        if (walk.is_real(t)) {
            copy_row(x.at(walk.row(t)), v, s.d);
        } else {
            zero(v, s.d);
        }
    }
}

// Gradients of tokens from those of their features, which are rotated back; zero for tokens that are not real. With ADD_TO they are added.
template <int MAP, Place PLACE, bool ADD_TO = false>
static void back(const Sizes &s, const Walk &walk, Turner &turner, float *near, Rows x, const float *df, Rows d_x, int64_t begin, int64_t end) {
    df -= begin * s.f_row;
    for (const Span &span : walk) {
        const float *from = df + span.t * s.f_row;
        const Rows rows = span.of(x), to = span.of(d_x), turned = PLACE == NEAR ? to : Rows{near, s.f_row};
        turner.rows<AS_IT_IS, true>(span.run, from, s.f_row, turned.x, turned.token);
        for (int64_t i = 0; i < span.run.tokens; i++)
            back_row<MAP, ADD_TO>(rows.at(i), turner.turns_nothing() ? from + i * s.f_row : turned.at(i), to.at(i), s.m);
    }
    for (int64_t t = begin; !ADD_TO && t < end; t++)
        if (!walk.is_real(t)) zero(d_x.at(walk.row(t)), s.m);
}

// Values of tokens begin … end to the rows of a tensor; zero for tokens that are not real. With ADD_TO they are added.
template <bool ADD_TO = false>
static void put_values(const Sizes &s, const Walk &walk, const float *v, Rows to, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++, v += s.v_row) {
        float *row = to.at(walk.row(t));
        if (walk.is_real(t)) {
            ADD_TO ? add_row(v, row, s.d) : copy_row(v, row, s.d);
        } else if (!ADD_TO) {
            zero(row, s.d);
        }
    }
}

}  // namespace ISA

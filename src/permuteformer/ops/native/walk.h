// The tokens of a row: which are shown, where they stand, and features of a block of them.
#pragma once

#include "turn.h"

namespace ISA {

enum Side { KEYS, QUERIES };

constexpr int64_t FEW = 32;  // tokens of a run: their numbers stay in the first cache while one piece after the other is turned for all of them

// Tokens t … stop, shown and going on by the same steps.
struct Span {
    int64_t t, stop, place;
    Run run;
};

// Goes along the tokens of one row, a block at a time.
class Walk {
    const uint8_t *shown;
    const int64_t *positions;
    int64_t token, axes, length;
    int64_t place;  // of the next token that is shown, where positions are counted
    Span *found;
    int64_t *steps;
    int64_t count = 0;

  public:
    Walk(const Call &call, int64_t b, int64_t begin, Side side, int32_t axes, Arena &arena)
        : axes(axes), length(side == QUERIES ? call.queries : call.length), found(arena.take<Span>(BLOCK)), steps(arena.take<int64_t>(BLOCK * axes)) {
        const bool apart = side == QUERIES && call.query_positions.data;
        const Positions &given = apart ? call.query_positions : call.positions;
        shown = call.shown && !apart ? call.shown + b * call.shown_batch : nullptr;
        positions = given.data ? given.data + b * given.batch : nullptr;
        token = given.token;
        place = call.start ? call.start[b] : 0;
        pass(0, begin);
    }
    bool is_shown(int64_t t) const { return !shown || shown[t]; }
    // Whether a vector that begins in row t of x may end behind the last row.
    bool is_near_end(int64_t t, int64_t row) const { return (length - 1 - t) * row < W; }

    // Looks at the tokens of a block: the next one, unless it was gone to another place.
    void look(int64_t begin, int64_t end) {
        count = 0;
        for (int64_t t = begin; t < end;) {
            if (!is_shown(t)) {
                t++;
                continue;
            }
            const int64_t stop = run_end(t, t + FEW < end ? t + FEW : end);
            Span &span = found[count];
            int64_t *step = steps + count++ * axes;
            span = {t, stop, place, {stop - t, positions ? positions + t * token : &span.place, step}};
            for (int64_t a = 0; a < axes; a++) step[a] = stop - t == 1 ? 0 : positions ? position(t + 1, a) - position(t, a) : 1;
            if (!positions) place += stop - t;
            t = stop;
        }
    }
    int64_t at() const { return place; }
    void go_to(int64_t at) { place = at; }
    void pass(int64_t begin, int64_t end) { place += positions ? 0 : count_shown(begin, end); }

    const Span *begin() const { return found; }
    const Span *end() const { return found + count; }

  private:
    int64_t count_shown(int64_t begin, int64_t end) const {
        if (!shown) return end - begin;
        int64_t total = 0;
        for (int64_t t = begin; t < end; t++) total += shown[t] != 0;
        return total;
    }
    int64_t position(int64_t t, int64_t axis) const { return positions[t * token + axis]; }
    // The end of the run of tokens that begins at t: shown, and going on by the same steps, 0 or 1.
    int64_t run_end(int64_t t, int64_t end) const {
        int64_t stop = t + 1;
        for (; stop < end && is_shown(stop); stop++)
            for (int64_t a = 0; positions && a < axes; a++) {
                const uint64_t step = static_cast<uint64_t>(position(stop, a)) - static_cast<uint64_t>(position(stop - 1, a));
                if (step > 1 || position(t + 1, a) - position(t, a) != static_cast<int64_t>(step)) return stop;
            }
        return stop;
    }
};

// Buffers of a head, with rows padded so that vectors fit and columns of the first cache are not all the same.
struct Sizes {
    ptrdiff_t m, d, mp, dp, f_row, v_row;

    explicit Sizes(const Call &call)
        : m(call.features), d(call.values), mp(padded(m)), dp(padded(d)), f_row(mp + W), v_row(dp) {}
    Matrix rows(float *data, ptrdiff_t row) const { return {data, row, PANEL}; }
    Matrix panels(float *data, ptrdiff_t rows) const { return {data, PANEL, rows * PANEL}; }
    static ptrdiff_t panel_size(ptrdiff_t rows, ptrdiff_t columns) { return rows * ((columns + PANEL - 1) / PANEL) * PANEL; }
    float *few_rows(Arena &arena) const { return arena.zeros<float>(FEW * f_row); }
};

static inline void carry_in(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; i < s.m; i++) copy_row(kv + i * s.d, to_kv + i * s.dp, s.d);
    copy_row(z, to_z, s.m);
}

static inline void carry_out(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; i < s.m; i++) copy_row(kv + i * s.dp, to_kv + i * s.d, s.d);
    copy_row(z, to_z, s.m);
}

// Where rows are: somewhere in memory, where only they themselves may be read or written; or in a buffer, with room for a vector behind each.
enum Place { FAR, NEAR };

// Features of the block begin … end of x, a row each; nothing where hidden. The last rows, if they are far, are mapped to a few near ones first.
template <int MAP, Place PLACE>
static void fill(const Sizes &s, const Walk &walk, Turner &turner, float *near, Rows x, int64_t begin, int64_t end, float *f) {
    f -= begin * s.f_row;
    for (const Span &span : walk) {
        float *to = f + span.t * s.f_row;
        if (turner.turns_nothing()) {
            for (int64_t i = 0; i < span.run.tokens; i++) map_row<MAP>(x.at(span.t + i), to + i * s.f_row, s.m);
        } else if (PLACE == NEAR || !walk.is_near_end(span.stop - 1, x.token)) {
            turner.rows<MAP, false>(span.run, x.at(span.t), x.token, to, s.f_row);
        } else {
            for (int64_t i = 0; i < span.run.tokens; i++) map_row<MAP>(x.at(span.t + i), near + i * s.f_row, s.m);
            turner.rows<AS_IT_IS, false>(span.run, near, s.f_row, to, s.f_row);
        }
    }
    for (int64_t t = begin; t < end; t++) {
        const ptrdiff_t known = walk.is_shown(t) ? s.m : 0;
        if (known < s.mp) zero(f + t * s.f_row + known, s.mp - known);
    }
}

static void fill_values(const Sizes &s, const Walk &walk, Rows x, int64_t begin, int64_t end, float *v) {
    for (int64_t t = begin; t < end; t++, v += s.v_row) {
        if (walk.is_shown(t)) {
            copy_row(x.at(t), v, s.d);
        } else {
            zero(v, s.d);
        }
    }
}

// The gradients of tokens, from those of their features, which are turned back where they are wanted if that is near, else in a few rows near: rows
// far away are a power of two apart as a rule, and fight for the same places of the first cache.
template <int MAP, Place PLACE>
static void back(const Sizes &s, const Walk &walk, Turner &turner, float *near, Rows x, const float *df, Rows d_x, int64_t begin, int64_t end) {
    df -= begin * s.f_row;
    for (const Span &span : walk) {
        const float *from = df + span.t * s.f_row;
        const Rows turned = PLACE == NEAR ? Rows{d_x.at(span.t), d_x.token} : Rows{near, s.f_row};
        turner.rows<AS_IT_IS, true>(span.run, from, s.f_row, turned.x, turned.token);
        for (int64_t i = 0; i < span.run.tokens; i++)
            back_row<MAP>(x.at(span.t + i), turner.turns_nothing() ? from + i * s.f_row : turned.at(i), d_x.at(span.t + i), s.m);
    }
    for (int64_t t = begin; t < end; t++)
        if (!walk.is_shown(t)) zero(d_x.at(t), s.m);
}

// What was computed of values, to where it is wanted; zero where hidden.
static void put_values(const Sizes &s, const Walk &walk, const float *v, Rows to, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++, v += s.v_row) {
        if (walk.is_shown(t)) {
            copy_row(v, to.at(t), s.d);
        } else {
            zero(to.at(t), s.d);
        }
    }
}

}  // namespace ISA

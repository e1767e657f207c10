// Linear attention of one head, block by block: features of a block exist in a buffer that stays in cache, and nowhere else.
#pragma once

#include <cmath>
#include <cstring>
#include <new>

#include "phi.h"

namespace ISA {

// Memory of one thread for one call, taken at once and kept aligned.
struct Arena {
    char *memory, *next;

    explicit Arena(size_t bytes) : memory(static_cast<char *>(::operator new(bytes + 64, std::align_val_t(64)))), next(memory) {}
    ~Arena() { ::operator delete(memory, std::align_val_t(64)); }
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    template <typename T>
    T *take(size_t count) {
        T *found = reinterpret_cast<T *>(next);
        next += (count * sizeof(T) + 63) / 64 * 64;
        std::memset(static_cast<void *>(found), 0, count * sizeof(T));
        return found;
    }
};

constexpr int64_t FEW = 32;

enum Side { KEYS, QUERIES };

// Goes along the tokens of one row: what is shown, and where it stands.
struct Walk {
    const Piece *pieces;
    const int32_t *lanes;
    int32_t count;
    int32_t axes = 1;
    const uint8_t *shown;
    const int64_t *positions;
    int64_t token, length;
    int64_t place;  // of the next token that is shown, where positions are counted

    Walk(const Call &call, int64_t b, int64_t h, int64_t begin, Side side = KEYS)
        : pieces(call.of_head ? call.pieces + call.of_head[h] : nullptr), lanes(call.lanes),
          count(call.of_head ? call.of_head[h + 1] - call.of_head[h] : 0) {
        const bool apart = side == QUERIES && call.query_positions.data;
        const Positions &given = apart ? call.query_positions : call.positions;
        shown = call.shown && !apart ? call.shown + b * call.shown_batch : nullptr;
        positions = given.data ? given.data + b * given.batch : nullptr;
        token = given.token;
        length = side == QUERIES ? call.queries : call.length;
        place = call.start ? call.start[b] : 0;
        if (!positions) place += count_shown(0, begin);
        for (int32_t n = 0; n < count; n++) axes = pieces[n].axis < axes ? axes : pieces[n].axis + 1;
    }
    bool is_shown(int64_t t) const { return !shown || shown[t]; }
    // Whether a vector that begins in row t of x may end behind the last row.
    bool is_near_end(int64_t t, int64_t row) const { return (length - 1 - t) * row < W; }
    int64_t count_shown(int64_t begin, int64_t end) const {
        if (!shown) return end - begin;
        int64_t found = 0;
        for (int64_t t = begin; t < end; t++) found += shown[t] != 0;
        return found;
    }
    void pass(int64_t begin, int64_t end) {
        if (!positions) place += count_shown(begin, end);
    }
    int64_t position(int64_t t, int32_t axis) const { return positions[t * token + axis]; }
    // The end of the run of tokens that begins at t: shown, and going on by the same steps, 0 or 1.
    int64_t run_end(int64_t t, int64_t end) const {
        int64_t stop = t + 1;
        for (; stop < end && is_shown(stop); stop++)
            for (int32_t a = 0; positions && a < axes; a++) {
                const uint64_t step = static_cast<uint64_t>(position(stop, a)) - static_cast<uint64_t>(position(stop - 1, a));
                if (step > 1 || position(t + 1, a) - position(t, a) != static_cast<int64_t>(step)) return stop;
            }
        return stop;
    }
    // Calls each(t, stop, counted) for runs of tokens that are shown: a few at a time, so that their numbers stay in the first cache while one
    // piece after the other is turned for all of them. counted is the place of the first, where positions are counted.
    template <typename Each>
    void runs(int64_t begin, int64_t end, Each each) const {
        int64_t counted = place;
        for (int64_t t = begin; t < end;) {
            if (!is_shown(t)) {
                t++;
                continue;
            }
            const int64_t stop = run_end(t, t + FEW < end ? t + FEW : end);
            each(t, stop, counted);
            counted += stop - t;
            t = stop;
        }
    }
    // The rows x of a run, mapped, each piece turned as far as the token's position says, or back, to the rows y.
    template <int MAP, bool BACK>
    void turn_rows(Turn *turns, int64_t t, int64_t stop, int64_t counted, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) const {
        const int64_t tokens = stop - t;
        for (int32_t n = 0; n < count; n++) {
            const Piece &piece = pieces[n];
            const int64_t first = positions ? position(t, piece.axis) : counted;
            const int64_t last = positions ? position(stop - 1, piece.axis) : counted + tokens - 1;
            const Run run{tokens, piece.period, turns[n].to(first, piece.period), tokens > 1 && last != first};
            const float *from = x + piece.begin;
            float *to = y + piece.begin;
            turns[n].last = last;
            turns[n].shift = piece.lanes < 0 ? turn<MAP, BACK>(run, from, x_row, to, y_row)
                                             : turn_lanes<MAP, BACK>(run, lanes + piece.lanes * LANES, piece.size, from, x_row, to, y_row);
        }
    }
};

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

// Buffers of a head, with rows padded so that vectors fit and columns of the first cache are not all the same.
struct Sizes {
    ptrdiff_t m, d, mp, dp, f_row, v_row;

    explicit Sizes(const Call &call)
        : m(call.features), d(call.values), mp(padded(m)), dp(padded(d)), f_row(mp + W), v_row(dp) {}
    Matrix rows(float *data, ptrdiff_t row) const { return {data, row, PANEL}; }
    Matrix panels(float *data, ptrdiff_t rows) const { return {data, PANEL, rows * PANEL}; }
    static ptrdiff_t panel_size(ptrdiff_t rows, ptrdiff_t columns) { return rows * ((columns + PANEL - 1) / PANEL) * PANEL; }
};

// What turning needs: how far each piece is turned, and rows for a run.
struct Room {
    Turn *turns;
    float *rows;

    Room(const Sizes &s, const Walk &walk, Arena &arena) : turns(arena.take<Turn>(walk.count)), rows(arena.take<float>(FEW * s.f_row)) {}
    static size_t bytes(const Sizes &s) { return sizeof(Turn) * s.m + 4 * FEW * s.f_row + 128; }
};

static inline void carry_in(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; i < s.m; i++) copy_row(kv + i * s.d, to_kv + i * s.dp, s.d);
    copy_row(z, to_z, s.m);
}

static inline void carry_out(const Sizes &s, const float *kv, const float *z, float *to_kv, float *to_z) {
    for (ptrdiff_t i = 0; i < s.m; i++) copy_row(kv + i * s.dp, to_kv + i * s.d, s.d);
    copy_row(z, to_z, s.m);
}

// Features of tokens begin … end of x, a row each; nothing where hidden. Of the last tokens they are made in `room` first, behind which is memory.
template <int MAP>
static void fill(const Sizes &s, const Walk &walk, Room &room, const float *x, int64_t token, int64_t begin, int64_t end, float *f) {
    f -= begin * s.f_row;
    walk.runs(begin, end, [&](int64_t t, int64_t stop, int64_t counted) {
        const bool near_end = walk.is_near_end(stop - 1, token);
        float *to = walk.count ? room.rows : f + t * s.f_row;
        for (int64_t i = 0; i < stop - t && (near_end || !walk.count); i++) map_row<MAP>(x + (t + i) * token, to + i * s.f_row, s.m);
        if (near_end) {
            walk.turn_rows<AS_IT_IS, false>(room.turns, t, stop, counted, room.rows, s.f_row, f + t * s.f_row, s.f_row);
        } else {
            walk.turn_rows<MAP, false>(room.turns, t, stop, counted, x + t * token, token, f + t * s.f_row, s.f_row);
        }
    });
    for (int64_t t = begin; t < end; t++) {
        const ptrdiff_t known = walk.is_shown(t) ? s.m : 0;
        if (known < s.mp) zero(f + t * s.f_row + known, s.mp - known);
    }
}

static void fill_values(const Sizes &s, const Walk &walk, const float *x, int64_t token, int64_t begin, int64_t end, float *v) {
    for (int64_t t = begin; t < end; t++, v += s.v_row) {
        if (walk.is_shown(t)) {
            copy_row(x + t * token, v, s.d);
        } else {
            zero(v, s.d);
        }
    }
}

// The gradients of tokens, from those of their features, which are turned back in `room`: rows of x and d_x are a power of two apart as a rule, and
// fight for the same places of the first cache.
template <int MAP>
static void back(const Sizes &s, const Walk &walk, Room &room, const float *x, int64_t token, const float *df, float *d_x, int64_t d_token,
                 int64_t begin, int64_t end) {
    df -= begin * s.f_row;
    walk.runs(begin, end, [&](int64_t t, int64_t stop, int64_t counted) {
        const float *from = walk.count ? room.rows : df + t * s.f_row;
        walk.turn_rows<AS_IT_IS, true>(room.turns, t, stop, counted, df + t * s.f_row, s.f_row, room.rows, s.f_row);
        for (int64_t i = 0; i < stop - t; i++) back_row<MAP>(x + (t + i) * token, from + i * s.f_row, d_x + (t + i) * d_token, s.m);
    });
    for (int64_t t = begin; t < end; t++)
        if (!walk.is_shown(t)) zero(d_x + t * d_token, s.m);
}

static Ahead::Rows rows(const Tensor4 &x, int64_t b, int64_t h, ptrdiff_t numbers) { return {x.row(b, h), x.token, numbers}; }

// The rows of some tensors that the block of tokens t … end will read.
template <typename... Rows>
static Ahead next(int64_t t, int64_t end, Rows... x) {
    const int64_t rows = end - t < BLOCK ? end - t : BLOCK;
    return rows > 0 ? Ahead(rows, Ahead::Rows{x.x + t * x.token, x.token, x.numbers}...) : Ahead();
}

static inline float divisor(const Call &call, float total) { return call.normalize && total != 0 ? total : 1; }

// The gradient of the total, from an output and from d_n, its gradient over the divisor.
static inline float d_divisor(const Call &call, float total, bool is_shown, const float *d_n, const float *out) {
    return call.normalize && total != 0 && is_shown ? -dot(d_n, out, call.values) : 0;
}

// Bidirectional

template <int MAP>
static void absorb(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end, float *kv, float *z) {
    const Sizes s(call);
    Arena arena(4 * (BLOCK * (s.f_row + s.v_row) + s.m * s.dp + s.mp) + Room::bytes(s) + 1024);
    float *f = arena.take<float>(BLOCK * s.f_row), *v = arena.take<float>(BLOCK * s.v_row);
    float *sum_kv = arena.take<float>(s.m * s.dp), *sum_z = arena.take<float>(s.mp);
    Walk walk(call, b, h, begin);
    Room room(s, walk, arena);
    for (int64_t t = begin; t < end; t += BLOCK) {
        const int64_t stop = t + BLOCK < end ? t + BLOCK : end, n = stop - t;
        fill_values(s, walk, call.v.row(b, h), call.v.token, t, stop, v);
        fill<MAP>(s, walk, room, call.k.row(b, h), call.k.token, t, stop, f);
        add_rows(sum_z, f, s.f_row, n, s.mp, [](ptrdiff_t) { return 1.0f; });
        multiply(s.m, s.dp, n, f, 1, s.f_row, s.rows(v, s.v_row), s.rows(sum_kv, s.dp), true,
                 next(stop, end, rows(call.k, b, h, s.m), rows(call.v, b, h, s.d)));
        walk.pass(t, stop);
    }
    carry_out(s, sum_kv, sum_z, kv, z);
}

template <int MAP>
static void read(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    Arena arena(4 * (BLOCK * (s.f_row + s.v_row) + s.m * s.dp + s.mp) + Room::bytes(s) + 1024);
    float *f = arena.take<float>(BLOCK * s.f_row), *o = arena.take<float>(BLOCK * s.v_row);
    float *kv = arena.take<float>(s.m * s.dp), *z = arena.take<float>(s.mp);
    carry_in(s, call.kv + head * s.m * s.d, call.z + head * s.m, kv, z);
    Walk walk(call, b, h, begin, QUERIES);
    Room room(s, walk, arena);
    float *out = call.out.row(b, h);
    for (int64_t t = begin; t < end; t += BLOCK) {
        const int64_t stop = t + BLOCK < end ? t + BLOCK : end, n = stop - t;
        fill<MAP>(s, walk, room, call.q.row(b, h), call.q.token, t, stop, f);
        multiply(n, s.dp, s.m, f, s.f_row, 1, s.rows(kv, s.dp), s.rows(o, s.v_row), false,
                 next(stop, end, rows(call.q, b, h, s.m)));
        for (int64_t i = 0; i < n; i++) {
            scale(o + i * s.v_row, 1 / divisor(call, dot(f + i * s.f_row, z, s.mp)), s.dp);
            copy_row(o + i * s.v_row, out + (t + i) * call.out.token, s.d);
        }
        walk.pass(t, stop);
    }
}

template <int MAP>
static void read_back(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end, float *d_kv, float *d_z) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    const ptrdiff_t turned = Sizes::panel_size(s.d, s.mp);
    Arena arena(4 * (2 * BLOCK * s.f_row + BLOCK * s.v_row + 2 * s.m * s.dp + turned + 2 * s.mp) + Room::bytes(s) + 2048);
    float *f = arena.take<float>(BLOCK * s.f_row), *df = arena.take<float>(BLOCK * s.f_row), *dn = arena.take<float>(BLOCK * s.v_row);
    float *kv = arena.take<float>(s.m * s.dp), *z = arena.take<float>(s.mp), *kv_t = arena.take<float>(turned);
    float *sum_kv = arena.take<float>(s.m * s.dp), *sum_z = arena.take<float>(s.mp);
    carry_in(s, call.kv + head * s.m * s.d, call.z + head * s.m, kv, z);
    transpose(kv, s.dp, s.m, s.d, s.panels(kv_t, s.d));
    Walk walk(call, b, h, begin, QUERIES);
    Room room(s, walk, arena);
    for (int64_t t = begin; t < end; t += BLOCK) {
        const int64_t stop = t + BLOCK < end ? t + BLOCK : end, n = stop - t;
        fill<MAP>(s, walk, room, call.q.row(b, h), call.q.token, t, stop, f);
        fill_values(s, walk, call.d_out.row(b, h), call.d_out.token, t, stop, dn);
        float d_total[BLOCK];
        for (int64_t i = 0; i < n; i++) {
            const float total = dot(f + i * s.f_row, z, s.mp), by = 1 / divisor(call, total);
            scale(dn + i * s.v_row, by, s.dp);
            d_total[i] = d_divisor(call, total, walk.is_shown(t + i), dn + i * s.v_row, call.out.row(b, h) + (t + i) * call.out.token);
        }
        multiply(n, s.mp, s.d, dn, s.v_row, 1, s.panels(kv_t, s.d), s.rows(df, s.f_row), false);
        multiply(s.m, s.dp, n, f, 1, s.f_row, s.rows(dn, s.v_row), s.rows(sum_kv, s.dp), true,
                 next(stop, end, rows(call.q, b, h, s.m), rows(call.d_out, b, h, s.d), rows(call.out, b, h, s.d)));
        for (int64_t i = 0; i < n; i++) add_scaled(df + i * s.f_row, z, d_total[i], s.mp);
        add_rows(sum_z, f, s.f_row, n, s.mp, [&](ptrdiff_t i) { return d_total[i]; });
        back<MAP>(s, walk, room, call.q.row(b, h), call.q.token, df, call.d_q.row(b, h), call.d_q.token, t, stop);
        walk.pass(t, stop);
    }
    carry_out(s, sum_kv, sum_z, d_kv, d_z);
}

template <int MAP>
static void absorb_back(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    const ptrdiff_t turned = Sizes::panel_size(s.d, s.mp);
    Arena arena(4 * (2 * BLOCK * s.f_row + 2 * BLOCK * s.v_row + s.m * s.dp + turned + s.mp) + Room::bytes(s) + 2048);
    float *f = arena.take<float>(BLOCK * s.f_row), *df = arena.take<float>(BLOCK * s.f_row);
    float *v = arena.take<float>(BLOCK * s.v_row), *dv = arena.take<float>(BLOCK * s.v_row);
    float *d_kv = arena.take<float>(s.m * s.dp), *d_z = arena.take<float>(s.mp), *d_kv_t = arena.take<float>(turned);
    carry_in(s, call.d_kv + head * s.m * s.d, call.d_z + head * s.m, d_kv, d_z);
    transpose(d_kv, s.dp, s.m, s.d, s.panels(d_kv_t, s.d));
    Walk walk(call, b, h, begin);
    Room room(s, walk, arena);
    for (int64_t t = begin; t < end; t += BLOCK) {
        const int64_t stop = t + BLOCK < end ? t + BLOCK : end, n = stop - t;
        fill_values(s, walk, call.v.row(b, h), call.v.token, t, stop, v);
        fill<MAP>(s, walk, room, call.k.row(b, h), call.k.token, t, stop, f);
        multiply(n, s.dp, s.m, f, s.f_row, 1, s.rows(d_kv, s.dp), s.rows(dv, s.v_row), false);
        multiply(n, s.mp, s.d, v, s.v_row, 1, s.panels(d_kv_t, s.d), s.rows(df, s.f_row), false,
                 next(stop, end, rows(call.k, b, h, s.m), rows(call.v, b, h, s.d)));
        for (int64_t i = 0; i < n; i++) {
            add_scaled(df + i * s.f_row, d_z, 1, s.mp);
            float *to = call.d_v.row(b, h) + (t + i) * call.d_v.token;
            if (walk.is_shown(t + i)) {
                copy_row(dv + i * s.v_row, to, s.d);
            } else {
                zero(to, s.d);
            }
        }
        back<MAP>(s, walk, room, call.k.row(b, h), call.k.token, df, call.d_k.row(b, h), call.d_k.token, t, stop);
        walk.pass(t, stop);
    }
}

// Causal

// Powers of a head's r in one block, where hidden tokens take no step. Every exponent is 0 or more, so none overflows.
struct Powers {
    float of[BLOCK + 1];
    float falling[BLOCK + 1 + W] = {};  // the same, the last first
    int32_t steps[BLOCK];               // up to each token, its own among them
    int32_t total;
    bool all_shown;

    explicit Powers(const float *log_decay) {
        for (int64_t n = 0; n <= BLOCK; n++)
            of[n] = falling[BLOCK - n] = log_decay ? static_cast<float>(std::exp(n * static_cast<double>(*log_decay))) : 1;
    }
    void count(const Walk &walk, int64_t begin, int64_t n) {
        total = 0;
        for (int64_t i = 0; i < n; i++) steps[i] = total += walk.is_shown(begin + i);
        all_shown = total == n;
    }
    // The weights of a query's own key and those before it, decayed.
    void decay(float *row, int64_t i) const {
        if (all_shown) {
            for (int64_t j = 0; j <= i; j += W) store(row + j, load(row + j) * load(falling + BLOCK - i + j));
        } else {
            for (int64_t j = 0; j <= i; j++) row[j] *= within(i, j);
        }
    }
    float within(int64_t i, int64_t j) const { return of[steps[i] - steps[j]]; }
    float read(int64_t i) const { return of[steps[i]]; }
    float write(int64_t i) const { return of[total - steps[i]]; }
    float across() const { return of[total]; }
};

static bool is_finite(const float *x, ptrdiff_t n) {
    vec total{};
    for (ptrdiff_t i = 0; i < n; i += W) total += load(x + i) * vec{};  // 0, or NaN
    return sum(total) == 0;
}

// Buffers and carries of a causal pass over one head.
struct Scan {
    Sizes s;
    ptrdiff_t p_row;
    float *fq, *fk, *fk_t, *v, *w, *o, *p, *kv, *z;

    static size_t bytes(const Call &call) {
        const Sizes s(call);
        return 4 * (2 * BLOCK * s.f_row + Sizes::panel_size(s.mp, BLOCK) + 3 * BLOCK * s.v_row + BLOCK * (BLOCK + W) + s.m * s.dp + s.mp) + 1024;
    }
    Scan(const Call &call, Arena &arena) : s(call), p_row(BLOCK + W) {
        fq = arena.take<float>(BLOCK * s.f_row), fk = arena.take<float>(BLOCK * s.f_row);
        fk_t = arena.take<float>(Sizes::panel_size(s.mp, BLOCK));
        v = arena.take<float>(BLOCK * s.v_row), w = arena.take<float>(BLOCK * s.v_row), o = arena.take<float>(BLOCK * s.v_row);
        p = arena.take<float>(BLOCK * p_row);
        kv = arena.take<float>(s.m * s.dp), z = arena.take<float>(s.mp);
    }

    // Weights of pairs in the block: phi(q)·phi(k) r^(i-j), and nothing for keys after the query.
    void weights(const Powers &powers, int64_t n) {
        transpose(fk, s.f_row, n, s.m, s.panels(fk_t, s.m));
        multiply(n, padded(n), s.m, fq, s.f_row, 1, s.panels(fk_t, s.m), s.rows(p, p_row), false);
        hide(powers, p, n);
    }
    // By setting what a query does not see to zero: a product would keep a NaN.
    void hide(const Powers &powers, float *x, int64_t n) const {
        for (int64_t i = 0; i < n; i++) {
            float *row = x + i * p_row;
            powers.decay(row, i);
            zero(row + i + 1, p_row - i - 1);
        }
    }
    // o = P v, where keys that a query does not see have no say, whatever their values are.
    void mix(int64_t n) {
        if (is_finite(v, n * s.v_row)) return multiply(n, s.dp, n, p, p_row, 1, s.rows(v, s.v_row), s.rows(o, s.v_row), false);
        for (int64_t i = 0; i < n; i++) {
            zero(o + i * s.v_row, s.dp);
            for (int64_t j = 0; j <= i; j++) add_scaled(o + i * s.v_row, v + j * s.v_row, p[i * p_row + j], s.dp);
        }
    }
    // The carry after the block's keys.
    void write(const Powers &powers, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            for (ptrdiff_t j = 0; j < s.dp; j += W) store(w + i * s.v_row + j, load(v + i * s.v_row + j) * all(powers.write(i)));
        if (powers.across() != 1) {
            scale(kv, powers.across(), s.m * s.dp);
            scale(z, powers.across(), s.mp);
        }
        multiply(s.m, s.dp, n, fk, 1, s.f_row, s.rows(w, s.v_row), s.rows(kv, s.dp), true);
        add_rows(z, fk, s.f_row, n, s.mp, [&](ptrdiff_t i) { return powers.write(i); });
    }
};

template <int MAP>
static void scan(const Call &call, int64_t b, int64_t h) {
    const int64_t head = b * call.heads + h, length = call.length;
    Arena arena(Scan::bytes(call) + 4 * BLOCK * padded(call.values) + 2 * Room::bytes(Sizes(call)) + 1024);
    Scan scan(call, arena);
    const Sizes &s = scan.s;
    float *carried = arena.take<float>(BLOCK * s.v_row);
    float *kv = call.kv + head * s.m * s.d, *z = call.z + head * s.m;
    carry_in(s, kv, z, scan.kv, scan.z);
    Powers powers(call.log_decay ? call.log_decay + h : nullptr);
    Walk walk(call, b, h, 0);
    Room of_keys(s, walk, arena), of_queries(s, walk, arena);
    const int64_t groups = (length + BLOCK * GROUP - 1) / (BLOCK * GROUP), size = s.m * s.d + s.m;
    for (int64_t t = 0; t < length; t += BLOCK) {
        const int64_t stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
        if (call.kept && t % (BLOCK * GROUP) == 0) {
            float *to = call.kept + (head * groups + t / (BLOCK * GROUP)) * size;
            carry_out(s, scan.kv, scan.z, to, to + s.m * s.d);
        }
        powers.count(walk, t, n);
        fill<MAP>(s, walk, of_keys, call.k.row(b, h), call.k.token, t, stop, scan.fk);
        fill<MAP>(s, walk, of_queries, call.q.row(b, h), call.q.token, t, stop, scan.fq);
        fill_values(s, walk, call.v.row(b, h), call.v.token, t, stop, scan.v);
        scan.weights(powers, n);
        scan.mix(n);
        multiply(n, s.dp, s.m, scan.fq, s.f_row, 1, s.rows(scan.kv, s.dp), s.rows(carried, s.v_row), false);
        float *out = call.out.row(b, h);
        for (int64_t i = 0; i < n; i++) {
            const float total = powers.read(i) * dot(scan.fq + i * s.f_row, scan.z, s.mp) + sum_row(scan.p + i * scan.p_row, padded(i + 1));
            add_scaled(scan.o + i * s.v_row, carried + i * s.v_row, powers.read(i), s.dp);
            scale(scan.o + i * s.v_row, 1 / divisor(call, total), s.dp);
            copy_row(scan.o + i * s.v_row, out + (t + i) * call.out.token, s.d);
        }
        scan.write(powers, n);
        walk.pass(t, stop);
    }
    carry_out(s, scan.kv, scan.z, kv, z);
}

// One token joins the carry and reads it: two passes over the carry, and nothing beside.
template <int MAP>
static void step(const Call &call, int64_t b, int64_t h) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    Arena arena(4 * (2 * s.f_row + 2 * s.dp) + Room::bytes(s) + 1024);
    float *fq = arena.take<float>(s.f_row), *fk = arena.take<float>(s.f_row), *v = arena.take<float>(s.dp), *o = arena.take<float>(s.dp);
    const Walk walk(call, b, h, 0);
    Room room(s, walk, arena);
    fill<MAP>(s, walk, room, call.q.row(b, h), 0, 0, 1, fq);
    fill<MAP>(s, walk, room, call.k.row(b, h), 0, 0, 1, fk);
    fill_values(s, walk, call.v.row(b, h), 0, 0, 1, v);
    const float decay = call.log_decay && walk.is_shown(0) ? std::exp(call.log_decay[h]) : 1;
    float *kv = call.kv + head * s.m * s.d, *z = call.z + head * s.m, sum = 0;
    for (ptrdiff_t i = 0; i < s.m; i++) {
        float *row = kv + i * s.d;
        const float k = fk[i], q = fq[i];
        for (ptrdiff_t j = 0; j < s.d; j++) {
            row[j] = row[j] * decay + k * v[j];
            o[j] += q * row[j];
        }
        z[i] = z[i] * decay + k;
        sum += q * z[i];
    }
    float *out = call.out.row(b, h);
    const float by = 1 / divisor(call, sum);
    for (ptrdiff_t j = 0; j < s.d; j++) out[j] = o[j] * by;
}

template <int MAP>
static void scan_back(const Call &call, int64_t b, int64_t h) {
    const int64_t head = b * call.heads + h, length = call.length, blocks = (length + BLOCK - 1) / BLOCK;
    const Sizes s(call);
    const ptrdiff_t turned = Sizes::panel_size(s.d, s.mp), side = BLOCK + W, carry = s.m * s.dp + s.mp;
    Arena arena(Scan::bytes(call) + Room::bytes(s) + 4096 +
                4 * (2 * BLOCK * s.f_row + 2 * BLOCK * s.v_row + BLOCK * side + 2 * turned + Sizes::panel_size(s.d, BLOCK) + (GROUP + 1) * carry));
    Scan scan(call, arena);
    float *dfq = arena.take<float>(BLOCK * s.f_row), *dfk = arena.take<float>(BLOCK * s.f_row);
    float *dn = arena.take<float>(BLOCK * s.v_row), *dv = arena.take<float>(BLOCK * s.v_row), *dp = arena.take<float>(BLOCK * side);
    float *kv_t = arena.take<float>(turned), *d_kv_t = arena.take<float>(turned), *v_t = arena.take<float>(Sizes::panel_size(s.d, BLOCK));
    float *d_kv = arena.take<float>(s.m * s.dp), *d_z = arena.take<float>(s.mp);
    float *met = arena.take<float>(GROUP * carry);  // carries that the blocks of a group met
    carry_in(s, call.d_kv + head * s.m * s.d, call.d_z + head * s.m, d_kv, d_z);
    Room room(s, Walk(call, b, h, 0), arena);
    Powers powers(call.log_decay ? call.log_decay + h : nullptr);
    const int64_t groups = (blocks + GROUP - 1) / GROUP, size = s.m * s.d + s.m;
    double d_log = 0;
    for (int64_t group = groups - 1; group >= 0; group--) {
        const int64_t first = group * GROUP, last = first + GROUP < blocks ? first + GROUP : blocks;
        const float *from = call.kept + (head * groups + group) * size;
        carry_in(s, from, from + s.m * s.d, scan.kv, scan.z);
        int64_t places[GROUP];
        {  // forwards again, for the carries alone
            Walk walk(call, b, h, first * BLOCK);
            for (int64_t block = first; block < last; block++) {
                const int64_t t = block * BLOCK, stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
                float *to = met + (block - first) * carry;
                copy_row(scan.kv, to, s.m * s.dp);
                copy_row(scan.z, to + s.m * s.dp, s.mp);
                places[block - first] = walk.place;
                if (block + 1 == last) break;
                powers.count(walk, t, n);
                fill<MAP>(s, walk, room, call.k.row(b, h), call.k.token, t, stop, scan.fk);
                fill_values(s, walk, call.v.row(b, h), call.v.token, t, stop, scan.v);
                scan.write(powers, n);
                walk.pass(t, stop);
            }
        }
        for (int64_t block = last - 1; block >= first; block--) {
            const int64_t t = block * BLOCK, stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
            float *kv = met + (block - first) * carry, *z = kv + s.m * s.dp;
            Walk here(call, b, h, 0);
            here.place = places[block - first];
            powers.count(here, t, n);
            fill<MAP>(s, here, room, call.k.row(b, h), call.k.token, t, stop, scan.fk);
            fill<MAP>(s, here, room, call.q.row(b, h), call.q.token, t, stop, scan.fq);
            fill_values(s, here, call.v.row(b, h), call.v.token, t, stop, scan.v);
            fill_values(s, here, call.d_out.row(b, h), call.d_out.token, t, stop, dn);
            scan.weights(powers, n);

            float d_total[BLOCK];
            for (int64_t i = 0; i < n; i++) {
                const float total = powers.read(i) * dot(scan.fq + i * s.f_row, z, s.mp) + sum_row(scan.p + i * scan.p_row, padded(i + 1));
                scale(dn + i * s.v_row, 1 / divisor(call, total), s.dp);
                d_total[i] = d_divisor(call, total, here.is_shown(t + i), dn + i * s.v_row, call.out.row(b, h) + (t + i) * call.out.token);
            }
            // Of the weights, before their decay.
            transpose(scan.v, s.v_row, n, s.d, s.panels(v_t, s.d));
            multiply(n, padded(n), s.d, dn, s.v_row, 1, s.panels(v_t, s.d), s.rows(dp, side), false);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j <= i; j++) dp[i * side + j] += d_total[i];
            if (call.d_log_decay)
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j <= i; j++)
                        d_log += static_cast<double>(dp[i * side + j]) * scan.p[i * scan.p_row + j] * (powers.steps[i] - powers.steps[j]);
            scan.hide(powers, dp, n);

            // Queries: from the pairs, and from the carry. d_n and what it reads are decayed to each token.
            multiply(n, s.dp, n, scan.p, 1, scan.p_row, s.rows(dn, s.v_row), s.rows(dv, s.v_row), false);
            multiply(n, s.mp, n, dp, side, 1, s.rows(scan.fk, s.f_row), s.rows(dfq, s.f_row), false);
            multiply(n, s.mp, n, dp, 1, side, s.rows(scan.fq, s.f_row), s.rows(dfk, s.f_row), false);
            for (int64_t i = 0; i < n; i++) {
                scale(dn + i * s.v_row, powers.read(i), s.dp);
                d_total[i] *= powers.read(i);
            }
            transpose(kv, s.dp, s.m, s.d, s.panels(kv_t, s.d));
            multiply(n, s.mp, s.d, dn, s.v_row, 1, s.panels(kv_t, s.d), s.rows(dfq, s.f_row), true);
            for (int64_t i = 0; i < n; i++) add_scaled(dfq + i * s.f_row, z, d_total[i], s.mp);
            if (call.d_log_decay) {
                multiply(n, s.dp, s.m, scan.fq, s.f_row, 1, s.rows(kv, s.dp), s.rows(scan.o, s.v_row), false);
                for (int64_t i = 0; i < n; i++)
                    d_log += powers.steps[i] * (static_cast<double>(dot(dn + i * s.v_row, scan.o + i * s.v_row, s.dp)) +
                                                static_cast<double>(d_total[i]) * dot(scan.fq + i * s.f_row, z, s.mp));
            }

            // Keys and values: what the carry beyond the block is worth.
            transpose(d_kv, s.dp, s.m, s.d, s.panels(d_kv_t, s.d));
            for (int64_t i = 0; i < n; i++)
                for (ptrdiff_t j = 0; j < s.dp; j += W) store(scan.w + i * s.v_row + j, load(scan.v + i * s.v_row + j) * all(powers.write(i)));
            multiply(n, s.mp, s.d, scan.w, s.v_row, 1, s.panels(d_kv_t, s.d), s.rows(dfk, s.f_row), true);
            multiply(n, s.dp, s.m, scan.fk, s.f_row, 1, s.rows(d_kv, s.dp), s.rows(scan.o, s.v_row), false);
            for (int64_t i = 0; i < n; i++) {
                add_scaled(dfk + i * s.f_row, d_z, powers.write(i), s.mp);
                add_scaled(dv + i * s.v_row, scan.o + i * s.v_row, powers.write(i), s.dp);
                if (call.d_log_decay)
                    d_log += (powers.total - powers.steps[i]) *
                             (static_cast<double>(dot(scan.w + i * s.v_row, scan.o + i * s.v_row, s.dp)) +
                              static_cast<double>(powers.write(i)) * dot(scan.fk + i * s.f_row, d_z, s.mp));
                float *to = call.d_v.row(b, h) + (t + i) * call.d_v.token;
                if (here.is_shown(t + i)) {
                    copy_row(dv + i * s.v_row, to, s.d);
                } else {
                    zero(to, s.d);
                }
            }

            // The carry that the block met.
            if (call.d_log_decay)
                d_log += powers.total * static_cast<double>(powers.across()) *
                         (static_cast<double>(dot(d_kv, kv, s.m * s.dp)) + static_cast<double>(dot(d_z, z, s.mp)));
            if (powers.across() != 1) {
                scale(d_kv, powers.across(), s.m * s.dp);
                scale(d_z, powers.across(), s.mp);
            }
            multiply(s.m, s.dp, n, scan.fq, 1, s.f_row, s.rows(dn, s.v_row), s.rows(d_kv, s.dp), true);
            add_rows(d_z, scan.fq, s.f_row, n, s.mp, [&](ptrdiff_t i) { return d_total[i]; });
            back<MAP>(s, here, room, call.q.row(b, h), call.q.token, dfq, call.d_q.row(b, h), call.d_q.token, t, stop);
            back<MAP>(s, here, room, call.k.row(b, h), call.k.token, dfk, call.d_k.row(b, h), call.d_k.token, t, stop);
        }
    }
    carry_out(s, d_kv, d_z, call.d_kv + head * s.m * s.d, call.d_z + head * s.m);
    if (call.d_log_decay) call.d_log_decay[head] = d_log;
}

}  // namespace ISA

// Bidirectional attention of one head without a decay: keys are summed into a state, which queries read. The features of a block of tokens
// exist in a buffer that stays in cache, and nowhere else.
#pragma once

#include <cmath>
#include <limits>

#include "walk.h"

namespace ISA {

static Ahead::Rows rows(Rows x, ptrdiff_t numbers) { return {x.x, x.token, numbers}; }

// The rows of some tensors that the block of tokens t … end will read.
template <typename... Given>
static Ahead next(int64_t t, int64_t end, Given... x) {
    const int64_t count = end - t < BLOCK ? end - t : BLOCK;
    return count > 0 ? Ahead(count, Ahead::Rows{x.x + t * x.token, x.token, x.numbers}...) : Ahead();
}

// Calls each(t, stop) for blocks of tokens.
template <typename Each>
static void blocks(int64_t begin, int64_t end, Each each) {
    for (int64_t t = begin; t < end; t += BLOCK) each(t, t + BLOCK < end ? t + BLOCK : end);
}

static inline float divisor(const Call &call, float total) { return call.normalize && total != 0 ? total : 1; }

// x / by. The reciprocal of a denormal is not finite, though x / by may be.
static inline void divide(float *x, float by, ptrdiff_t n) {
    if (std::abs(by) < std::numeric_limits<float>::min()) {
        constexpr float LARGE = 18446744073709551616.0f;  // 2^64
        scale(x, LARGE, n);
        by *= LARGE;
    }
    scale(x, 1 / by, n);
}

// The gradient of a sum of weights, from the output and from d_n, the gradient of the output over the divisor.
static inline float d_divisor(const Call &call, float total, bool is_real, const float *d_n, const float *out) {
    return call.normalize && total != 0 && is_real ? -dot(d_n, out, call.values) : 0;
}

// Buffers for a block of tokens of one head: features, values, their gradients, and a few rows.
struct Buffers {
    float *f, *df, *v, *dv, *near;

    Buffers(const Sizes &s, Arena &arena, bool gradients) {
        f = arena.zeros<float>(BLOCK * s.f_row), v = arena.zeros<float>(BLOCK * s.v_row);
        df = gradients ? arena.zeros<float>(BLOCK * s.f_row) : nullptr, dv = gradients ? arena.zeros<float>(BLOCK * s.v_row) : nullptr;
        near = s.run_rows(arena);
    }
};

// The state of each of the four passes over a head.
struct Head {
    const Call &call;
    Sizes s;
    Turner turner;
    Buffers buffers;
    float *kv, *z;

    Head(const Call &call, int64_t h, const Buffers &buffers, Arena &arena)
        : call(call), s(call), turner(call, h, arena), buffers(buffers), kv(arena.zeros<float>(s.m * s.dp)), z(arena.zeros<float>(s.mp)) {}

    void load_head(const float *all_kv, const float *all_z, int64_t head) { load_state(s, all_kv + head * s.m * s.d, all_z + head * s.m, kv, z); }
    // kv transposed, for products with it from the other side.
    float *transposed(Arena &arena) const {
        float *found = arena.zeros<float>(Sizes::panel_size(s.d, s.mp));
        transpose(kv, s.dp, s.m, s.d, s.panels(found, s.d));
        return found;
    }
};

template <int MAP, Place PLACE = FAR>
struct Absorb : Head {
    Absorb(const Call &call, int64_t, int64_t h, const Buffers &buffers, Arena &arena) : Head(call, h, buffers, arena) {}

    void block(const Walk &walk, Rows k, Rows v, int64_t t, int64_t stop, Ahead &&ahead = Ahead()) {
        const int64_t n = stop - t;
        fill_values(s, walk, v, t, stop, buffers.v);
        fill<MAP, PLACE>(s, walk, turner, buffers.near, k, t, stop, buffers.f);
        add_rows(z, buffers.f, s.f_row, n, s.mp, [](ptrdiff_t) { return 1.0f; });
        multiply(s.m, s.dp, n, buffers.f, 1, s.f_row, s.rows(buffers.v, s.v_row), s.rows(kv, s.dp), ADD, std::move(ahead));
    }
};

template <int MAP, Place PLACE = FAR>
struct Read : Head {
    Read(const Call &call, int64_t b, int64_t h, const Buffers &buffers, Arena &arena) : Head(call, h, buffers, arena) {
        load_head(call.kv, call.z, b * call.heads + h);
    }
    void block(const Walk &walk, Rows q, Rows out, int64_t t, int64_t stop, Ahead &&ahead = Ahead()) {
        const int64_t n = stop - t;
        float *f = buffers.f, *o = buffers.v;
        fill<MAP, PLACE>(s, walk, turner, buffers.near, q, t, stop, f);
        multiply(n, s.dp, s.m, f, s.f_row, 1, s.rows(kv, s.dp), s.rows(o, s.v_row), NEW, std::move(ahead));
        for (int64_t i = 0; i < n; i++) {
            divide(o + i * s.v_row, divisor(call, dot(f + i * s.f_row, z, s.mp)), s.dp);
            copy_row(o + i * s.v_row, out.at(t + i), s.d);
        }
    }
};

template <int MAP, Place PLACE = FAR>
struct ReadBack : Head {
    float *kv_t, *sum_kv, *sum_z;

    ReadBack(const Call &call, int64_t b, int64_t h, const Buffers &buffers, Arena &arena) : Head(call, h, buffers, arena) {
        load_head(call.kv, call.z, b * call.heads + h);
        kv_t = transposed(arena);
        sum_kv = arena.zeros<float>(s.m * s.dp), sum_z = arena.zeros<float>(s.mp);
    }
    void block(const Walk &walk, Rows q, Rows out, Rows d_out, Rows d_q, int64_t t, int64_t stop, Ahead &&ahead = Ahead()) {
        const int64_t n = stop - t;
        float *f = buffers.f, *df = buffers.df, *dn = buffers.dv, d_total[BLOCK];
        fill<MAP, PLACE>(s, walk, turner, buffers.near, q, t, stop, f);
        fill_values(s, walk, d_out, t, stop, dn);
        for (int64_t i = 0; i < n; i++) {
            const float total = dot(f + i * s.f_row, z, s.mp);
            divide(dn + i * s.v_row, divisor(call, total), s.dp);
            d_total[i] = d_divisor(call, total, walk.is_real(t + i), dn + i * s.v_row, out.at(t + i));
        }
        multiply(n, s.mp, s.d, dn, s.v_row, 1, s.panels(kv_t, s.d), s.rows(df, s.f_row), NEW);
        multiply(s.m, s.dp, n, f, 1, s.f_row, s.rows(dn, s.v_row), s.rows(sum_kv, s.dp), ADD, std::move(ahead));
        for (int64_t i = 0; i < n; i++) add_scaled(df + i * s.f_row, z, d_total[i], s.mp);
        add_rows(sum_z, f, s.f_row, n, s.mp, [&](ptrdiff_t i) { return d_total[i]; });
        back<MAP, PLACE>(s, walk, turner, buffers.near, q, df, d_q, t, stop);
    }
};

template <int MAP, Place PLACE = FAR>
struct AbsorbBack : Head {
    float *kv_t;  // of the gradient of the summed state

    AbsorbBack(const Call &call, int64_t b, int64_t h, const Buffers &buffers, Arena &arena) : Head(call, h, buffers, arena) {
        load_head(call.d_kv_in, call.d_z_in, b * call.heads + h);
        kv_t = transposed(arena);
    }
    void block(const Walk &walk, Rows k, Rows v, Rows d_k, Rows d_v, int64_t t, int64_t stop, Ahead &&ahead = Ahead()) {
        const int64_t n = stop - t;
        float *f = buffers.f, *df = buffers.df;
        fill_values(s, walk, v, t, stop, buffers.v);
        fill<MAP, PLACE>(s, walk, turner, buffers.near, k, t, stop, f);
        multiply(n, s.dp, s.m, f, s.f_row, 1, s.rows(kv, s.dp), s.rows(buffers.dv, s.v_row), NEW);
        multiply(n, s.mp, s.d, buffers.v, s.v_row, 1, s.panels(kv_t, s.d), s.rows(df, s.f_row), To(z), std::move(ahead));
        put_values(s, walk, buffers.dv, d_v, t, stop);
        back<MAP, PLACE>(s, walk, turner, buffers.near, k, df, d_k, t, stop);
    }
};

// One pass over the tokens begin … end of a head: each(walk, t, stop) for its blocks.
template <typename Each>
static void pass(const Head &head, int64_t b, int64_t begin, int64_t end, Side side, Arena &arena, Each each) {
    Walk walk(head.call, b, side, head.turner.axes, arena);
    walk.skip(0, begin);
    blocks(begin, end, [&](int64_t t, int64_t stop) {
        walk.look(t, stop);
        each(walk, t, stop);
    });
}

template <int MAP>
static void absorb(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end, float *kv, float *z) {
    Arena arena;
    Absorb<MAP> head(call, b, h, Buffers(Sizes(call), arena, false), arena);
    const Rows k = call.k.rows(b, h), v = call.v.rows(b, h);
    pass(head, b, begin, end, KEYS, arena, [&](const Walk &walk, int64_t t, int64_t stop) {
        head.block(walk, k, v, t, stop, next(stop, end, rows(k, call.features), rows(v, call.values)));
    });
    store_state(head.s, head.kv, head.z, kv, z);
}

template <int MAP>
static void read(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end) {
    Arena arena;
    Read<MAP> head(call, b, h, Buffers(Sizes(call), arena, false), arena);
    const Rows q = call.q.rows(b, h), out = call.out.rows(b, h);
    pass(head, b, begin, end, QUERIES, arena, [&](const Walk &walk, int64_t t, int64_t stop) {
        head.block(walk, q, out, t, stop, next(stop, end, rows(q, call.features)));
    });
}

template <int MAP>
static void read_back(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end, float *d_kv, float *d_z) {
    Arena arena;
    ReadBack<MAP> head(call, b, h, Buffers(Sizes(call), arena, true), arena);
    const Rows q = call.q.rows(b, h), out = call.out.rows(b, h), d_out = call.d_out.rows(b, h), d_q = call.d_q.rows(b, h);
    pass(head, b, begin, end, QUERIES, arena, [&](const Walk &walk, int64_t t, int64_t stop) {
        head.block(walk, q, out, d_out, d_q, t, stop, next(stop, end, rows(q, call.features), rows(d_out, call.values), rows(out, call.values)));
    });
    store_state(head.s, head.sum_kv, head.sum_z, d_kv, d_z);
}

template <int MAP>
static void absorb_back(const Call &call, int64_t b, int64_t h, int64_t begin, int64_t end) {
    Arena arena;
    AbsorbBack<MAP> head(call, b, h, Buffers(Sizes(call), arena, true), arena);
    const Rows k = call.k.rows(b, h), v = call.v.rows(b, h), d_k = call.d_k.rows(b, h), d_v = call.d_v.rows(b, h);
    pass(head, b, begin, end, KEYS, arena, [&](const Walk &walk, int64_t t, int64_t stop) {
        head.block(walk, k, v, d_k, d_v, t, stop, next(stop, end, rows(k, call.features), rows(v, call.values)));
    });
}

}  // namespace ISA

// Bidirectional attention with its norm and linear maps before it, its linear map, dropout and the sum after it, block by block: queries, keys,
// values and features exist for a block of tokens only, and are found again for the gradients.
#pragma once

#include <algorithm>

#include "drop.h"
#include "linear.h"
#include "total.h"

namespace ISA {

// The linear map of one head's queries or keys.
static Packed of_head(const Attend &attend, float *packs, int64_t h) {
    const int64_t m = attend.call.features;
    return {packs + h * packed_size(m, attend.width), m, attend.width};
}

// One pass over the tokens begin … end of a row, all heads together: each(heads, walk, t, stop) for its blocks.
template <typename Pass, typename Each>
static std::vector<Pass> pass_heads(const Attend &attend, int64_t b, int64_t begin, int64_t end, Side side, bool gradients, Arena &arena, Each each) {
    const Buffers buffers(Sizes(attend.call), arena, gradients);
    std::vector<Pass> heads;
    heads.reserve(attend.call.heads);
    int32_t axes = 1;
    for (int64_t h = 0; h < attend.call.heads; h++) {
        heads.emplace_back(attend.call, b, h, buffers, arena);
        axes = std::max(axes, heads.back().turner.axes);
    }
    Walk walk(attend.call, b, begin, side, axes, arena);
    blocks(begin, end, [&](int64_t t, int64_t stop) {
        walk.look(t, stop);
        each(heads, walk, t, stop);
    });
    return heads;
}

template <int MAP>
static void attend_absorb(const Attend &attend, const Packs &packs, int64_t b, int64_t begin, int64_t end, float *kv, float *z) {
    Arena arena;
    const Call &call = attend.call;
    const ptrdiff_t width = attend.width;
    const Packed value{packs.third, call.heads * call.values, width};
    Normed normed(attend.norm, width, arena);
    const Block k(call.features, arena), v(value.out, arena);
    const auto heads = pass_heads<Absorb<MAP, NEAR>>(attend, b, begin, end, KEYS, false, arena, [&](auto &heads, const Walk &walk, int64_t t, int64_t stop) {
        normed(stop - t, attend.x + (b * call.length + t) * width);
        value(stop - t, normed.block, v);
        for (int64_t h = 0; h < call.heads; h++) {
            of_head(attend, packs.second, h)(stop - t, normed.block, k);
            heads[h].block(walk, k.from(t), v.from(t, h * call.values), t, stop);
        }
    });
    for (int64_t h = 0; h < call.heads; h++)
        carry_out(heads[h].s, heads[h].kv, heads[h].z, kv + h * call.features * call.values, z + h * call.features);
}

template <int MAP>
static void attend_read(const Attend &attend, const Packs &packs, int64_t b, int64_t begin, int64_t end) {
    Arena arena;
    const Call &call = attend.call;
    const ptrdiff_t width = attend.width, inner = call.heads * call.values;
    const Packed output{packs.fourth, width, inner};
    Normed normed(attend.norm, width, arena);
    const Block q(call.features, arena), mixed(inner, arena), out(width, arena);
    pass_heads<Read<MAP, NEAR>>(attend, b, begin, end, QUERIES, false, arena, [&](auto &heads, const Walk &walk, int64_t t, int64_t stop) {
        const int64_t n = stop - t, first = b * call.queries + t;
        const float *x = attend.queries + first * width;
        normed(n, x);
        for (int64_t h = 0; h < call.heads; h++) {
            of_head(attend, packs.first, h)(n, normed.block, q);
            heads[h].block(walk, q.from(t), mixed.from(t, h * call.values), t, stop);
        }
        output(n, mixed, out);
        for (int64_t i = 0; i < n; i++) {
            if (attend.mixed) copy_row(mixed.at(i), attend.mixed + (first + i) * inner, inner);
            drop_row(attend.chance, first + i, out.at(i), x + i * width, attend.y + (first + i) * width, static_cast<uint32_t>(width));
        }
    });
}

// The gradients of a head's linear map and of what went into it, from those of a block that came out.
struct HeadBack {
    const Attend &attend;
    const Linear &linear;
    const Block &d, &d_normed;
    float *d_weight, *d_bias;
    std::vector<float> sums;  // of biases, whose heads may end within a vector

    HeadBack(const Attend &attend, const Linear &linear, const Block &d, const Block &d_normed, float *d_weight)
        : attend(attend), linear(linear), d(d), d_normed(d_normed), d_weight(d_weight),
          d_bias(d_weight + attend.call.heads * attend.call.features * attend.width), sums(attend.call.heads * padded(attend.call.features)) {}

    void operator()(int64_t n, int64_t h, const Normed &normed) {
        const ptrdiff_t m = attend.call.features, width = attend.width, weights = h * m * width;
        add_up(n, padded(m), d, sums.data() + h * padded(m));
        add_products(n, m, width, d, normed.block.matrix(), d_weight + weights, width);
        multiply(n, width, m, d.x, d.row, 1, by_rows(linear.weight + weights, width), d_normed.matrix(), h > 0);
    }
    ~HeadBack() {
        const ptrdiff_t m = attend.call.features;
        for (int64_t h = 0; h < attend.call.heads; h++)
            for (ptrdiff_t i = 0; i < m; i++) d_bias[h * m + i] += sums[h * padded(m) + i];
    }
};

template <int MAP>
static void attend_read_back(const Attend &attend, const Packs &packs, int64_t b, int64_t begin, int64_t end, float *d_kv, float *d_z, float *sums) {
    Arena arena;
    const Call &call = attend.call;
    const ptrdiff_t width = attend.width, inner = call.heads * call.values, features = call.heads * call.features;
    Normed normed(attend.norm, width, arena);
    const Block q(call.features, arena), d_q(call.features, arena), d_out(width, arena), d_mixed(inner, arena), d_normed(width, arena);
    float *d_output = sums + features * (width + 1), *d_output_bias = d_output + width * inner, *d_norm = d_output_bias + width;
    HeadBack head_back(attend, attend.query, d_q, d_normed, sums);
    const auto heads = pass_heads<ReadBack<MAP, NEAR>>(attend, b, begin, end, QUERIES, true, arena, [&](auto &heads, const Walk &walk, int64_t t, int64_t stop) {
        const int64_t n = stop - t, first = b * call.queries + t;
        const float *x = attend.queries + first * width, *d_y = attend.d_y + first * width;
        normed(n, x);
        for (int64_t i = 0; i < n; i++) drop_row(attend.chance, first + i, d_y + i * width, nullptr, d_out.at(i), static_cast<uint32_t>(width));
        float *mixed = attend.mixed + first * inner;
        add_up(n, width, d_out, d_output_bias);
        add_products(n, width, inner, d_out, by_rows(mixed, inner), d_output, inner);
        multiply(n, inner, width, d_out.x, d_out.row, 1, by_rows(attend.output.weight, inner), d_mixed.matrix(), NEW);
        for (int64_t h = 0; h < call.heads; h++) {
            of_head(attend, packs.first, h)(n, normed.block, q);
            heads[h].block(walk, q.from(t), Rows{mixed + h * call.values - t * inner, inner}, d_mixed.from(t, h * call.values), d_q.from(t), t, stop);
            head_back(n, h, normed);
        }
        normed.back(n, x, d_normed, d_y, attend.d_queries + first * width, d_norm, d_norm + width);
    });
    for (int64_t h = 0; h < call.heads; h++)
        carry_out(heads[h].s, heads[h].sum_kv, heads[h].sum_z, d_kv + h * call.features * call.values, d_z + h * call.features);
}

template <int MAP>
static void attend_absorb_back(const Attend &attend, const Packs &packs, int64_t b, int64_t begin, int64_t end, float *sums) {
    Arena arena;
    const Call &call = attend.call;
    const ptrdiff_t width = attend.width, inner = call.heads * call.values, features = call.heads * call.features;
    const Packed value{packs.third, inner, width};
    Normed normed(attend.norm, width, arena);
    const Block k(call.features, arena), d_k(call.features, arena), v(inner, arena), d_v(inner, arena), d_normed(width, arena);
    float *d_value = sums + features * (width + 1), *d_value_bias = d_value + inner * width, *d_norm = d_value_bias + inner;
    HeadBack head_back(attend, attend.key, d_k, d_normed, sums);
    pass_heads<AbsorbBack<MAP, NEAR>>(attend, b, begin, end, KEYS, true, arena, [&](auto &heads, const Walk &walk, int64_t t, int64_t stop) {
        const int64_t n = stop - t, first = b * call.length + t;
        const float *x = attend.x + first * width;
        float *d_x = attend.d_x + first * width;
        normed(n, x);
        value(n, normed.block, v);
        for (int64_t h = 0; h < call.heads; h++) {
            of_head(attend, packs.second, h)(n, normed.block, k);
            heads[h].block(walk, k.from(t), v.from(t, h * call.values), d_k.from(t), d_v.from(t, h * call.values), t, stop);
            head_back(n, h, normed);
        }
        add_up(n, inner, d_v, d_value_bias);
        add_products(n, inner, width, d_v, normed.block.matrix(), d_value, width);
        multiply(n, width, inner, d_v.x, d_v.row, 1, by_rows(attend.value.weight, width), d_normed.matrix(), ADD);
        normed.back(n, x, d_normed, attend.d_x == attend.d_queries ? d_x : nullptr, d_x, d_norm, d_norm + width);
    });
}

}  // namespace ISA

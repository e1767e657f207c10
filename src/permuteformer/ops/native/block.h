// The two halves of a transformer block, each one pass over blocks of tokens: norm, linear maps, attention or activation, dropout and the
// residual sum. Everything wider than the model exists for a block of tokens only, and is computed again for the gradients.
#pragma once

#include "total.h"

namespace ISA {

// Activations of a feed-forward network and their slopes.

typedef int32_t bits __attribute__((vector_size(4 * W)));

// By their numbers in fused_block.py.
enum Activation { GELU = 0, RELU_ACTIVATION = 1 };

// exp(x) for x from -87 to 0: 2^n e^r, where |r| is at most log(2) / 2.
static inline vec exp_of_negative(vec x) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the last bits
    const vec shifted = x * 1.44269504f + shift, n = shifted - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return (vec)((bits)sum + (((bits)shifted - (bits)shift) << 23));
}

// The cumulative normal distribution to 2e-7; zero where it is less.
static inline vec normal_cdf(vec x) {
    constexpr float END = 5.54f;
    const vec most = (x > END) ? all(END) : x, square = most * most;
    vec above = square * 2.2504436e-08f + 6.3521893e-06f;
    above = above * square + 0.00017075583f;
    above = above * square + 0.0046887225f;
    above = above * square + 0.03405527f;
    above = above * square + 0.39894223f;
    vec under = square * 1.1903757e-06f + 7.4198346e-05f;
    under = under * square + 0.0018953918f;
    under = under * square + 0.028759377f;
    under = under * square + 0.25202975f;
    under = under * square + 1.0f;
    return (x < -END) ? vec{} : most * (above / under) + 0.5f;
}

static inline vec normal_density(vec x) {
    const vec exponent = x * x * -0.5f;
    return exp_of_negative((exponent < -87.0f) ? all(-87.0f) : exponent) * 0.3989422804f;
}

// Activates h in place, and writes the slope unless it is null; count is a multiple of W.
static void activate(Activation activation, float *h, float *slope, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i += W) {
        const vec x = load(h + i);
        vec value, by{};
        if (activation == GELU) {
            const vec below = normal_cdf(x);
            value = x * below;
            if (slope) by = below + x * normal_density(x);
        } else {
            value = (vec{} > x) ? vec{} : x;  // a NaN stays one
            by = (x > vec{}) ? all(1) : vec{};
        }
        store(h + i, value);
        if (slope) store(slope + i, by);
    }
}

// Dropout. A hash of the seed, the row and the column decides, so that nothing is saved for the backward pass.

static inline uint32_t hash32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// The noise of one row.
struct Noise {
    uint32_t first, second, dropped;
    float scale;

    Noise(const Chance &chance, int64_t row) : dropped(static_cast<uint32_t>(chance.dropped)) {
        uint64_t x = static_cast<uint64_t>(chance.seed) + (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;  // SplitMix64
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x = x ^ (x >> 31);
        first = static_cast<uint32_t>(x), second = static_cast<uint32_t>(x >> 32);
        scale = static_cast<float>(4294967296.0 / (4294967296.0 - dropped));
    }
    float of(float x, uint32_t column) const { return hash32(hash32(first + column) ^ second) >= dropped ? x * scale : 0.f; }
};

// y = residual + dropout(x); a null residual is zero. y may be x or the residual.
static inline void drop_row(const Chance &chance, int64_t row, const float *x, const float *residual, float *y, uint32_t count) {
    const Noise noise(chance, row);
    if (residual && chance.dropped) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = residual[i] + noise.of(x[i], i);
    } else if (residual) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = residual[i] + x[i];
    } else {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = noise.of(x[i], i);
    }
}

static void drop(const Drop &call, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
        drop_row(call.chance, n, call.x + n * call.width, nullptr, call.y + n * call.width, static_cast<uint32_t>(call.width));
}

// A linear map of few rows: weights are read once, in the order in which they are stored.

template <int ROWS_AT_ONCE>
static void project_rows(const Project &call, int64_t row, int64_t begin, int64_t end) {
    constexpr int OUTPUTS = 4;
    for (int64_t n = begin; n < end; n += OUTPUTS) {
        const int some = static_cast<int>(end - n < OUTPUTS ? end - n : OUTPUTS);
        const float *weights[OUTPUTS];
        for (int j = 0; j < OUTPUTS; j++) weights[j] = call.linear.weight + (n + (j < some ? j : 0)) * call.in;
        vec sums[ROWS_AT_ONCE][OUTPUTS] = {};
        for (int64_t k = 0; k < call.in; k += W)
#pragma GCC unroll 4
            for (int j = 0; j < OUTPUTS; j++) {
                const vec weight = load(weights[j] + k);
#pragma GCC unroll 4
                for (int i = 0; i < ROWS_AT_ONCE; i++) sums[i][j] += load(call.x + (row + i) * call.in + k) * weight;
            }
        for (int i = 0; i < ROWS_AT_ONCE; i++)
            for (int j = 0; j < some; j++) call.y[(row + i) * call.out + n + j] = sum(sums[i][j]) + (call.linear.bias ? call.linear.bias[n + j] : 0);
    }
}

static void project(const Project &call, int64_t begin, int64_t end) {
    int64_t row = 0;
    for (; row + 4 <= call.rows; row += 4) project_rows<4>(call, row, begin, end);
    for (; row < call.rows; row++) project_rows<1>(call, row, begin, end);
}

// Norms and linear maps of a block of rows in cache. Widths are multiples of W unless a comment says otherwise.

// A block of rows, each one vector longer than needed: rows a power of two apart would share cache sets.
struct Block {
    float *x;
    ptrdiff_t row;

    Block(ptrdiff_t width, Arena &arena) : x(arena.take<float>(BLOCK * (padded(width) + W))), row(padded(width) + W) {}
    float *at(ptrdiff_t i) const { return x + i * row; }
    Matrix matrix(ptrdiff_t column = 0) const { return {x + column, row, PANEL}; }
    // As the rows of tokens t, t + 1, ….
    Rows from(int64_t t, ptrdiff_t column = 0) const { return {x + column - t * row, row}; }
};

static Matrix by_rows(const float *x, ptrdiff_t row) { return {const_cast<float *>(x), row, PANEL}; }

// A packed linear map of any sizes: the bias in a row, then the weight transposed in panels.
struct Packed {
    float *data;
    ptrdiff_t out, in;

    static ptrdiff_t columns(ptrdiff_t out) { return (out + PANEL - 1) / PANEL * PANEL; }
    // From an output, which is a multiple of PANEL, and an input on.
    Matrix weight(ptrdiff_t output = 0, ptrdiff_t input = 0) const { return {data + columns(out) + output * in + input * PANEL, PANEL, in * PANEL}; }
    // y = x W^T + b
    void operator()(ptrdiff_t rows, const Block &x, const Block &y) const { multiply(rows, padded(out), in, x.x, x.row, 1, weight(), y.matrix(), To(data)); }
};

static void pack(const Linear &linear, int64_t out, int64_t in, float *to) {
    const Packed packed{to, out, in};
    const ptrdiff_t columns = Packed::columns(out);
    const Matrix weight = packed.weight();
    zero(to, columns);
    if (linear.bias) copy_row(linear.bias, to, out);
    if (columns > out) zero(weight.data + (columns / PANEL - 1) * weight.panel, weight.panel);
    transpose(linear.weight, in, out, in, weight);
}

// d_weight += d_y^T x
static void add_products(ptrdiff_t rows, ptrdiff_t out, ptrdiff_t in, const Block &d_y, Matrix x, float *d_weight, ptrdiff_t d_row) {
    multiply(out, in, rows, d_y.x, 1, d_y.row, x, by_rows(d_weight, d_row), ADD);
}

static void add_bias(ptrdiff_t rows, ptrdiff_t width, const Block &d_y, float *d_bias) {
    add_rows(d_bias, d_y.x, d_y.row, rows, width, [](ptrdiff_t) { return 1.0f; });
}

// A layer norm of a block of rows, which saves their mean and scale.
struct Normed {
    const Norm &norm;
    ptrdiff_t width;
    Block block;
    float mean[BLOCK], scale[BLOCK];

    Normed(const Norm &norm, ptrdiff_t width, Arena &arena) : norm(norm), width(width), block(width, arena) {}

    void operator()(ptrdiff_t rows, const float *x) {
        for (ptrdiff_t i = 0; i < rows; i++, x += width) {
            const float middle = sum_row(x, width) / width;
            vec squares{};
            for (ptrdiff_t j = 0; j < width; j += W) {
                const vec off = load(x + j) - middle;
                squares += off * off;
            }
            const float by = 1 / std::sqrt(sum(squares) / width + static_cast<float>(norm.epsilon));
            mean[i] = middle, scale[i] = by;
            float *to = block.at(i);
            for (ptrdiff_t j = 0; j < width; j += W) store(to + j, (load(x + j) - middle) * by * load(norm.weight + j) + load(norm.bias + j));
        }
    }
    // d_x = residual + the gradient through the norm (a null residual is zero); adds the gradients of its weight and bias.
    void back(ptrdiff_t rows, const float *x, const Block &d, const float *residual, float *d_x, float *d_weight, float *d_bias) const {
        for (ptrdiff_t i = 0; i < rows; i++, x += width, d_x += width, residual += residual ? width : 0) {
            const float *from = d.at(i), middle = mean[i], by = scale[i];
            vec plain{}, steep{};
            for (ptrdiff_t j = 0; j < width; j += W) {
                const vec found = (load(x + j) - middle) * by, given = load(from + j), own = given * load(norm.weight + j);
                plain += own;
                steep += own * found;
                store(d_weight + j, load(d_weight + j) + given * found);
                store(d_bias + j, load(d_bias + j) + given);
            }
            const float level = sum(plain) / width, slope = sum(steep) / width;
            for (ptrdiff_t j = 0; j < width; j += W) {
                const vec found = (load(x + j) - middle) * by, own = load(from + j) * load(norm.weight + j);
                const vec gradient = (own - level - found * slope) * by;
                store(d_x + j, residual ? load(residual + j) + gradient : gradient);
            }
        }
    }
};

// The feed-forward half. The hidden layer is computed a part at a time.

constexpr ptrdiff_t PART_OF_HIDDEN = 256;  // a multiple of every PANEL

template <typename Each>
static void parts_of_hidden(const Feed &feed, Each each) {
    for (ptrdiff_t begin = 0; begin < feed.hidden; begin += PART_OF_HIDDEN)
        each(begin, feed.hidden - begin < PART_OF_HIDDEN ? feed.hidden - begin : PART_OF_HIDDEN);
}

static void feed(const Feed &feed, const Packs &packs, int64_t begin, int64_t end) {
    Arena arena;
    const ptrdiff_t width = feed.width;
    const Packed expand{packs.first, feed.hidden, width}, contract{packs.second, width, feed.hidden};
    Normed normed(feed.norm, width, arena);
    const Block hidden(PART_OF_HIDDEN, arena), out(width, arena);
    blocks(begin, end, [&](int64_t t, int64_t stop) {
        const int64_t n = stop - t;
        const float *x = feed.x + t * width;
        normed(n, x);
        parts_of_hidden(feed, [&](ptrdiff_t first, ptrdiff_t some) {
            multiply(n, some, width, normed.block.x, normed.block.row, 1, expand.weight(first), hidden.matrix(), To(expand.data + first));
            for (int64_t i = 0; i < n; i++) activate(static_cast<Activation>(feed.activation), hidden.at(i), nullptr, some);
            multiply(n, width, some, hidden.x, hidden.row, 1, contract.weight(0, first), out.matrix(), first ? To(ADD) : To(contract.data));
        });
        for (int64_t i = 0; i < n; i++) drop_row(feed.chance, t + i, out.at(i), x + i * width, feed.y + (t + i) * width, static_cast<uint32_t>(width));
    });
}

static void feed_back(const Feed &feed, const Packs &packs, int64_t begin, int64_t end, float *sums) {
    Arena arena;
    const ptrdiff_t width = feed.width, all_hidden = feed.hidden;
    const Packed expand{packs.first, all_hidden, width};
    Normed normed(feed.norm, width, arena);
    const Block hidden(PART_OF_HIDDEN, arena), slope(PART_OF_HIDDEN, arena), d_hidden(PART_OF_HIDDEN, arena), d_out(width, arena), d_normed(width, arena);
    float *d_expand = sums, *d_expand_bias = d_expand + all_hidden * width, *d_contract = d_expand_bias + all_hidden;
    float *d_contract_bias = d_contract + width * all_hidden, *d_norm = d_contract_bias + width, *d_norm_bias = d_norm + width;
    blocks(begin, end, [&](int64_t t, int64_t stop) {
        const int64_t n = stop - t;
        const float *x = feed.x + t * width, *d_y = feed.d_y + t * width;
        normed(n, x);
        for (int64_t i = 0; i < n; i++) drop_row(feed.chance, t + i, d_y + i * width, nullptr, d_out.at(i), static_cast<uint32_t>(width));
        add_bias(n, width, d_out, d_contract_bias);
        parts_of_hidden(feed, [&](ptrdiff_t first, ptrdiff_t some) {
            multiply(n, some, width, normed.block.x, normed.block.row, 1, expand.weight(first), hidden.matrix(), To(expand.data + first));
            for (int64_t i = 0; i < n; i++) activate(static_cast<Activation>(feed.activation), hidden.at(i), slope.at(i), some);
            add_products(n, width, some, d_out, hidden.matrix(), d_contract + first, all_hidden);
            multiply(n, some, width, d_out.x, d_out.row, 1, by_rows(feed.contract.weight + first, all_hidden), d_hidden.matrix(), NEW);
            for (int64_t i = 0; i < n; i++)
                for (ptrdiff_t j = 0; j < some; j += W) store(d_hidden.at(i) + j, load(d_hidden.at(i) + j) * load(slope.at(i) + j));
            add_bias(n, some, d_hidden, d_expand_bias + first);
            add_products(n, some, width, d_hidden, normed.block.matrix(), d_expand + first * width, width);
            multiply(n, width, some, d_hidden.x, d_hidden.row, 1, by_rows(feed.expand.weight + first * width, width), d_normed.matrix(), first > 0);
        });
        normed.back(n, x, d_normed, d_y, feed.d_x + t * width, d_norm, d_norm_bias);
    });
}

// The attention half, with bidirectional attention without a decay.

// The packed linear map of one head's queries or keys.
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
    Walk walk(attend.call, b, side, axes, arena);
    walk.skip(0, begin);
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
        store_state(heads[h].s, heads[h].kv, heads[h].z, kv + h * call.features * call.values, z + h * call.features);
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

// Gradients of a head's linear map and of its input, from those of a block of its output.
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
        add_bias(n, padded(m), d, sums.data() + h * padded(m));
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
        add_bias(n, width, d_out, d_output_bias);
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
        store_state(heads[h].s, heads[h].sum_kv, heads[h].sum_z, d_kv + h * call.features * call.values, d_z + h * call.features);
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
        add_bias(n, inner, d_v, d_value_bias);
        add_products(n, inner, width, d_v, normed.block.matrix(), d_value, width);
        multiply(n, width, inner, d_v.x, d_v.row, 1, by_rows(attend.value.weight, width), d_normed.matrix(), ADD);
        normed.back(n, x, d_normed, attend.d_x == attend.d_queries ? d_x : nullptr, d_x, d_norm, d_norm + width);
    });
}

}  // namespace ISA

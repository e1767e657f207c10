// Attention of one head whose weights depend on the order of tokens: causal, or two-sided with weights r^|i-j|.
//
// A state runs along blocks of tokens. Each block reads it, adds the pairs within itself, and adds its keys to it. TWO_SIDED sweeps twice:
// from the last block to the first for keys after a query, then from the first to the last for the others. The backward pass sweeps both
// ways too: the state S of keys and the gradient G, the sum of f(q) dn^T, run in the same direction, so nothing is saved between blocks.
#pragma once

#include "total.h"

namespace ISA {

// A block of tokens of one segment. first, last: the block before it, after it, is of another segment.
struct Range {
    int64_t begin, end, count, segment;
    bool first, last;
};

// A token outside the decay: it sees, and is seen by, all tokens of its segment with weight 1.
struct GlobalToken {
    int64_t row, count;
};

// Cuts a row of the batch into blocks, and finds its global tokens.
struct Ranges {
    std::vector<Range> blocks;
    std::vector<GlobalToken> globals;
    std::vector<size_t> first_global;  // of each segment, and their number
    bool continues, continued;         // whether the state before, the state after, are of the row's first and last segment

    Ranges(const Call &call, int64_t b, const int64_t *order, int64_t block) {
        const int64_t length = call.length, *segments = call.segments ? call.segments + b * length : nullptr;
        const uint8_t *mask = call.mask ? call.mask + b * length : nullptr, *global = call.global_mask ? call.global_mask + b * length : nullptr;
        const auto row = [=](int64_t t) { return order ? order[t] : t; };
        const auto differ = [=](int64_t t, int64_t u) { return segments && segments[row(t)] != segments[row(u)]; };
        continues = !segments || !call.state_segment || segments[row(0)] == call.state_segment[b];
        continued = !segments || !call.after_segment || segments[row(length - 1)] == call.after_segment[b];
        int64_t count = continues && call.start ? call.start[b] : 0;
        bool first = false;
        first_global.push_back(0);
        for (int64_t t = 0, end; t < length; t = end) {
            end = std::min(t + block, length);
            for (int64_t u = t + 1; segments && u < end; u++)
                if (differ(t, u)) end = u;
            const bool last = end < length && differ(t, end);
            blocks.push_back({t, end, count, static_cast<int64_t>(first_global.size()) - 1, first, last});
            if (!mask && !global) count += end - t;
            for (int64_t u = t; (mask || global) && u < end; u++) {
                if (mask && !mask[row(u)]) continue;
                if (global && global[row(u)]) globals.push_back({row(u), count});
                count++;
            }
            first = last;
            if (last) first_global.push_back(globals.size()), count = 0;
        }
        first_global.push_back(globals.size());
    }
};

// How many steps of the decay a state takes to each token of a block, from each token to its other edge, and the powers of r of these.
struct Steps {
    int32_t read[BLOCK], write[BLOCK];
    float read_power[BLOCK], write_power[BLOCK];
};

// Powers of a head's r. Every exponent is 0 or more, so none overflows.
class Powers {
    float both[2 * BLOCK + 1 + W];  // r^|n| at BLOCK + n
    bool all_real = true;

  public:
    const bool decays;
    int32_t steps[BLOCK], total = 0;  // real tokens of the block up to each, itself included; all of them
    Steps left, right;                // of a state that comes from the left, from the right
    float across = 1;

    explicit Powers(const double *log_decay) : decays(log_decay) {
        for (int64_t n = 0; n <= BLOCK; n++) both[BLOCK - n] = both[BLOCK + n] = decays ? static_cast<float>(std::exp(n * *log_decay)) : 1;
        std::fill_n(both + 2 * BLOCK + 1, W, 0.0f);
    }
    void look(const Walk &walk, const Range &range) {
        const int64_t n = range.end - range.begin;
        total = 0;
        for (int64_t i = 0; i < n; i++) steps[i] = total += walk.is_real(range.begin + i);
        all_real = total == n;
        for (int64_t i = 0; i < n; i++) {
            const int32_t before = steps[i] - walk.is_real(range.begin + i);
            set(left, i, steps[i], total - steps[i]);
            set(right, i, total - before, before);
        }
        across = of(total);
    }
    // Multiplies the scores of query i with keys 0 … count - 1 by their decay, in whole vectors.
    void decay(float *row, int64_t i, int64_t count) const {
        if (!decays) return;
        if (all_real) {
            for (int64_t j = 0; j < count; j += W) store(row + j, load(row + j) * load(both + BLOCK - i + j));
        } else {
            for (int64_t j = 0; j < count; j++) row[j] *= of(std::abs(steps[i] - steps[j]));
        }
    }

  private:
    float of(int32_t n) const { return both[BLOCK + n]; }
    void set(Steps &to, int64_t i, int32_t read, int32_t write) const {
        to.read[i] = read, to.write[i] = write, to.read_power[i] = of(read), to.write_power[i] = of(write);
    }
};

constexpr int64_t SHORT_ROW = 1 << 18;  // floats of a head's features: 1 MiB, the cache of a core

static bool is_finite(const float *x, ptrdiff_t n) {
    vec total{};
    for (ptrdiff_t i = 0; i < n; i += W) total += load(x + i) * vec{};  // 0, or NaN
    return sum(total) == 0;
}

// A state of m x d, or its transpose, and m; in whole vectors.
struct State {
    const ptrdiff_t size, features;
    float *kv, *z;

    State(ptrdiff_t size, ptrdiff_t features, Arena &arena)
        : size(size), features(features), kv(arena.zeros<float>(size)), z(arena.zeros<float>(features)) {}
    void clear() const {
        zero(kv, size);
        zero(z, features);
    }
    void decay(float by) const {
        if (by == 1) return;
        scale(kv, by, size);
        scale(z, by, features);
    }
};

// The tokens of one head, block by block: buffers, features, and what all passes share.
template <int MAP>
struct Scan {
    const Call &call;
    const int64_t b, h, head;
    const Sizes s;
    Arena arena;
    Turner of_keys, of_queries;
    Walk walk;
    Powers powers;
    const Ranges ranges;
    const ptrdiff_t p_row = BLOCK + W;
    // Of a short row, the features of all tokens are kept for the second sweep; else they are made again.
    const bool keeps_rows;
    const int64_t rows;  // of buffers
    int64_t n = 0, sweeps = 0;  // tokens of the current block; the current sweep
    const Range *following = nullptr;  // the next block of the sweep
    float *all_q, *all_k, *all_v, *fq, *fk, *v;  // all rows, and those of the current block
    float *fk_t, *o, *w, *p, *near;
    // Global tokens: features of their queries and keys, and values, one row each.
    float *gq, *gk, *gv;
    const int64_t *still;  // steps of a run of one token

    Scan(const Call &call, int64_t b, int64_t h)
        : call(call), b(b), h(h), head(b * call.heads + h), s(call), of_keys(call, h, arena), of_queries(call, h, arena),
          walk(call, b, KEYS, of_keys.axes, arena, call.order(b, h)), powers(call.log_decay ? call.log_decay + h : nullptr),
          ranges(call, b, call.order(b, h), block_size(call)), keeps_rows(call.queries && call.length * s.f_row <= SHORT_ROW),
          rows(keeps_rows ? call.length : block_size(call)) {
        fq = all_q = rows_of_features(), fk = all_k = rows_of_features(), v = all_v = rows_of_values(), o = block_of_values(), w = block_of_values();
        fk_t = arena.zeros<float>(Sizes::panel_size(s.mp, BLOCK)), p = arena.zeros<float>(BLOCK * p_row), near = s.run_rows(arena);
        const size_t count = ranges.globals.size();
        still = arena.zeros<int64_t>(of_keys.axes);
        gq = arena.zeros<float>(count * s.mp), gk = arena.zeros<float>(count * s.mp), gv = arena.zeros<float>(count * s.dp);
        for (size_t g = 0; g < count; g++) {
            const GlobalToken &token = ranges.globals[g];
            token_features(token, of_keys, call.k.rows(b, h).at(token.row), gk + g * s.mp);
            if (call.queries) token_features(token, of_queries, call.q.rows(b, h).at(token.row), gq + g * s.mp);
            copy_row(call.v.rows(b, h).at(token.row), gv + g * s.dp, s.d);
        }
    }
    // Smaller blocks compute fewer pairs; larger ones touch the state less often.
    static int64_t block_size(const Call &call) { return call.mode == TWO_SIDED ? BLOCK / 4 : BLOCK; }
    float *rows_of_features() { return arena.zeros<float>(rows * s.f_row); }
    float *rows_of_values() { return arena.zeros<float>(rows * s.v_row); }
    float *block_of_values() { return arena.zeros<float>(block_size(call) * s.v_row); }
    State state() { return State(s.m * s.dp, s.mp, arena); }

    // Makes the features and values of a block, or takes those of the sweep before.
    void look(const Range &range) {
        n = range.end - range.begin;
        const int64_t first = keeps_rows ? range.begin : 0;
        fq = all_q + first * s.f_row, fk = all_k + first * s.f_row, v = all_v + first * s.v_row;
        walk.count_from(range.count);
        walk.look(range.begin, range.end);
        powers.look(walk, range);
        if (keeps_rows && sweeps > 1) return;
        fill<MAP, FAR>(s, walk, of_keys, near, call.k.rows(b, h), range.begin, range.end, fk);
        if (call.queries) fill<MAP, FAR>(s, walk, of_queries, near, call.q.rows(b, h), range.begin, range.end, fq);
        fill_values(s, walk, call.v.rows(b, h), range.begin, range.end, v);
    }
    // The features of one row, permuted, in a buffer of mp floats.
    void token_features(const GlobalToken &token, Turner &turner, const float *x, float *f) {
        if (turner.turns_nothing()) return map_row<MAP>(x, f, s.m);
        map_row<MAP>(x, near, s.m);
        turner.rows<AS_IT_IS, false>(run_of(token), near, s.f_row, w_row(), s.f_row);
        copy_row(w_row(), f, s.m);
    }
    Run run_of(const GlobalToken &token) const {
        const Positions &at = call.positions;
        return {1, at.data ? at.data + b * at.batch + token.row * at.token : &token.count, still};
    }
    float *w_row() const { return all_q; }  // a free row with room behind it
    // Calls each(g) for the global tokens of a segment, and for pairs of them.
    template <typename Each>
    void each_global(int64_t segment, Each each) const {
        for (size_t g = ranges.first_global[segment]; g < ranges.first_global[segment + 1]; g++) each(g);
    }

    template <typename Each>
    void each_global_pair(Each each) const {
        for (size_t segment = 0; segment + 1 < ranges.first_global.size(); segment++)
            each_global(segment, [&](size_t g) { each_global(segment, [&](size_t other) { each(g, other); }); });
    }

    // p = weights of the pairs of the block: scores by their decay, and zero for keys that a query does not see.
    void pairs() {
        transpose(fk, s.f_row, n, s.m, s.panels(fk_t, s.m, n));
        multiply(n, padded(n), s.m, fq, s.f_row, 1, s.panels(fk_t, s.m, n), s.rows(p, p_row), NEW);
        decay_and_hide(p);
    }
    // Sets what a query does not see to zero: multiplying by zero would keep a NaN.
    void decay_and_hide(float *x) const {
        for (int64_t i = 0; i < n; i++) {
            const int64_t seen = call.mode == CAUSAL ? i + 1 : n;
            powers.decay(x + i * p_row, i, seen);
            zero(x + i * p_row + seen, padded(n) - seen);
        }
    }
    // o = p v. A zero weight does not hide a value that is not finite, so then only visible keys are summed.
    void mix() {
        if (call.mode == TWO_SIDED || is_finite(v, n * s.v_row)) return multiply(n, s.dp, n, p, p_row, 1, s.rows(v, s.v_row), s.rows(o, s.v_row), NEW);
        for (int64_t i = 0; i < n; i++) {
            zero(o + i * s.v_row, s.dp);
            for (int64_t j = 0; j <= i; j++) add_scaled(o + i * s.v_row, v + j * s.v_row, p[i * p_row + j], s.dp);
        }
    }
    // The state beyond the block: decayed, and the block's keys added.
    void absorb(const State &state, const Steps &steps) {
        for (int64_t i = 0; i < n; i++) scaled(v + i * s.v_row, steps.write_power[i], w + i * s.v_row, s.dp);
        state.decay(powers.across);
        multiply(s.m, s.dp, n, fk, 1, s.f_row, s.rows(w, s.v_row), s.rows(state.kv, s.dp), ADD, ahead());
        add_rows(state.z, fk, s.f_row, n, s.mp, [&](ptrdiff_t i) { return steps.write_power[i]; });
    }
    template <typename Each>
    void each_block(bool from_right, Each each) {
        sweeps++;
        const int64_t count = static_cast<int64_t>(ranges.blocks.size());
        for (int64_t i = 0; i < count; i++) {
            const Range *here = &ranges.blocks[from_right ? count - 1 - i : i];
            following = i + 1 < count ? here + (from_right ? -1 : 1) : nullptr;
            each(*here);
        }
    }
    // The rows that the next block will read; none where they were read before, or are in another order.
    Ahead ahead(bool gradients = false) const {
        if (!following || call.orders || (keeps_rows && sweeps > 1)) return Ahead();
        const int64_t t = following->begin, end = following->end;
        const Ahead::Rows k = ISA::rows(call.k.rows(b, h), call.features), v = ISA::rows(call.v.rows(b, h), call.values);
        if (!call.queries) return next(t, end, k, v);
        const Ahead::Rows q = ISA::rows(call.q.rows(b, h), call.features);
        if (!gradients) return next(t, end, q, k, v);
        return next(t, end, q, k, v, ISA::rows(call.d_out.rows(b, h), call.values), ISA::rows(call.out.rows(b, h), call.values));
    }
    const float *of_head(const float *x, ptrdiff_t size) const { return x ? x + head * size : nullptr; }

    // Sums over keys after each query, not divided: to out and totals. Without queries, the state of all keys, seen from the first token.
    void sweep_from_right() {
        State right = state();
        if (ranges.continued) load_state(s, of_head(call.after_kv, s.m * s.d), of_head(call.after_z, s.m), right.kv, right.z);
        each_block(true, [&](const Range &range) {
            if (range.last) right.clear();
            look(range);
            if (call.queries) {
                multiply(n, s.dp, s.m, fq, s.f_row, 1, s.rows(right.kv, s.dp), s.rows(o, s.v_row), NEW);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t row = walk.row(range.begin + i);
                    const float power = powers.right.read_power[i];
                    scale(o + i * s.v_row, power, s.dp);
                    copy_row(o + i * s.v_row, call.out.rows(b, h).at(row), s.d);
                    call.totals[head * call.length + row] = power * dot(fq + i * s.f_row, right.z, s.mp);
                }
            }
            absorb(right, powers.right);
        });
        if (call.reverse) store_state(s, right.kv, right.z, call.kv + head * s.m * s.d, call.z + head * s.m);
    }

    void sweep_from_left() {
        State left = state();
        if (ranges.continues) load_state(s, of_head(call.kv_in, s.m * s.d), of_head(call.z_in, s.m), left.kv, left.z);
        float *carried = block_of_values();
        const size_t count = ranges.globals.size();
        float *global_out = arena.zeros<float>(count * s.dp), *global_total = arena.zeros<float>(count + 1);
        each_block(false, [&](const Range &range) {
            if (range.first) left.clear();
            look(range);
            if (call.queries) {
                pairs();
                mix();
                multiply(n, s.dp, s.m, fq, s.f_row, 1, s.rows(left.kv, s.dp), s.rows(carried, s.v_row), NEW);
                for (int64_t i = 0; i < n; i++) {
                    const int64_t row = walk.row(range.begin + i);
                    float *out = o + i * s.v_row, *result = call.out.rows(b, h).at(row), &saved = call.totals[head * call.length + row];
                    const float power = powers.left.read_power[i];
                    float total = power * dot(fq + i * s.f_row, left.z, s.mp) + sum_row(p + i * p_row, padded(n));
                    add_scaled(out, carried + i * s.v_row, power, s.dp);
                    if (call.mode == TWO_SIDED) {
                        total += saved;
                        add_row(result, out, s.d);
                    }
                    each_global(range.segment, [&](size_t g) { read_key(fq + i * s.f_row, gk + g * s.mp, gv + g * s.dp, out, total); });
                    divide(out, divisor(call, total), s.dp);
                    copy_row(out, result, s.d);
                    saved = total;
                }
                each_global(range.segment, [&](size_t g) {
                    for (int64_t i = 0; i < n; i++) read_key(gq + g * s.mp, fk + i * s.f_row, v + i * s.v_row, global_out + g * s.dp, global_total[g]);
                });
            }
            absorb(left, powers.left);
        });
        each_global_pair([&](size_t g, size_t other) {
            read_key(gq + g * s.mp, gk + other * s.mp, gv + other * s.dp, global_out + g * s.dp, global_total[g]);
        });
        for (size_t g = 0; call.queries && g < count; g++) {
            const int64_t row = ranges.globals[g].row;
            divide(global_out + g * s.dp, divisor(call, global_total[g]), s.dp);
            copy_row(global_out + g * s.dp, call.out.rows(b, h).at(row), s.d);
            call.totals[head * call.length + row] = global_total[g];
        }
        store_state(s, left.kv, left.z, call.kv + head * s.m * s.d, call.z + head * s.m);
    }
    // Adds what a query gets from a key with weight 1.
    void read_key(const float *query, const float *key, const float *value, float *out, float &total) const {
        const float weight = dot(query, key, s.mp);
        total += weight;
        add_scaled(out, value, weight, s.dp);
    }
};

template <int MAP>
static void scan(const Call &call, int64_t b, int64_t h) {
    Scan<MAP> scan(call, b, h);
    if (call.mode == TWO_SIDED && (call.reverse || call.queries)) scan.sweep_from_right();
    if (!call.reverse) scan.sweep_from_left();
}

// One causal token: it is added to the state, then reads it. Two passes over the state, and nothing else.
template <int MAP>
static void step(const Call &call, int64_t b, int64_t h) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    Arena arena;
    float *fq = arena.zeros<float>(s.f_row), *fk = arena.zeros<float>(s.f_row), *v = arena.zeros<float>(s.dp), *o = arena.zeros<float>(s.dp);
    const bool first = call.segments && call.state_segment && call.segments[b] != call.state_segment[b];
    Turner turner(call, h, arena);
    Walk walk(call, b, KEYS, turner.axes, arena);
    if (first) walk.count_from(0);
    walk.look(0, 1);
    float *near = s.run_rows(arena);
    fill<MAP, FAR>(s, walk, turner, near, call.q.rows(b, h), 0, 1, fq);
    fill<MAP, FAR>(s, walk, turner, near, call.k.rows(b, h), 0, 1, fk);
    fill_values(s, walk, call.v.rows(b, h), 0, 1, v);
    const float decay = call.log_decay && walk.is_real(0) ? static_cast<float>(std::exp(call.log_decay[h])) : 1;
    const bool has_state = call.kv_in && !first;
    const float *kv_in = call.kv_in + head * s.m * s.d, *z_in = call.z_in + head * s.m;
    float *kv = call.kv + head * s.m * s.d, *z = call.z + head * s.m, total = 0;
    for (ptrdiff_t i = 0; i < s.m; i++) {
        const float k = fk[i], q = fq[i];
        for (ptrdiff_t j = 0; j < s.d; j++) {
            kv[i * s.d + j] = (has_state ? kv_in[i * s.d + j] * decay : 0) + k * v[j];
            o[j] += q * kv[i * s.d + j];
        }
        z[i] = (has_state ? z_in[i] * decay : 0) + k;
        total += q * z[i];
    }
    float *out = call.out.rows(b, h).x;
    const float by = divisor(call, total);
    for (ptrdiff_t j = 0; j < s.d; j++) out[j] = o[j] / by;
}

// The backward pass. dn is d_out over the sum of weights, d_total the gradient of that sum.
template <int MAP>
struct ScanBack : Scan<MAP> {
    typedef Scan<MAP> Base;
    using Base::arena, Base::b, Base::call, Base::each_block, Base::each_global, Base::fk, Base::fk_t, Base::fq, Base::gk, Base::gq, Base::gv,
        Base::h, Base::head, Base::keeps_rows, Base::look, Base::n, Base::near, Base::of_head, Base::of_keys, Base::of_queries, Base::p, Base::p_row, Base::powers,
        Base::ranges, Base::s, Base::sweeps, Base::v, Base::w, Base::walk;

    float *all_dq, *all_dk, *all_dv, *dfq, *dfk, *dv;  // of all rows, and of the current block
    float *dn, *dnr, *df, *dp, *v_t, d_total[BLOCK];
    // Global tokens: dn and d_total of their queries, and gradients of their features and values.
    float *g_dn, *g_dtotal, *g_dq, *g_dk, *g_dv;
    double d_log = 0;

    ScanBack(const Call &call, int64_t b, int64_t h) : Base(call, b, h) {
        const auto zeros = [&](size_t count) { return arena.template zeros<float>(count); };
        all_dq = this->rows_of_features(), all_dk = this->rows_of_features(), all_dv = this->rows_of_values();
        dn = this->block_of_values(), dnr = this->block_of_values(), df = zeros(BLOCK * s.f_row), dp = zeros(BLOCK * p_row);
        v_t = zeros(s.d * p_row);
        const size_t count = ranges.globals.size();
        g_dn = zeros(count * s.dp), g_dv = zeros(count * s.dp), g_dtotal = zeros(count), g_dq = zeros(count * s.mp), g_dk = zeros(count * s.mp);
        for (size_t g = 0; call.queries && g < count; g++) {
            const int64_t row = ranges.globals[g].row;
            copy_row(call.d_out.rows(b, h).at(row), g_dn + g * s.dp, s.d);
            g_dtotal[g] = divide_gradient(row, true, g_dn + g * s.dp);
        }
    }
    void run() {
        const bool two_sided = call.mode == TWO_SIDED && call.queries, reverse = call.reverse;
        const State from_left = transposed(), from_right = transposed();
        // The gradient of the state that the call returned.
        load_transposed(of_head(call.d_kv, s.m * s.d), of_head(call.d_z, s.m), reverse ? from_left : from_right);
        sweep(false, !reverse, two_sided || reverse, from_left);
        if (!reverse || call.d_log_decay) sweep(true, two_sided || reverse, !reverse, from_right);
        if (call.queries) put_globals();
        if (call.d_kv_in && ranges.continues) store_transposed(from_right, call.d_kv_in, call.d_z_in);
        if (call.d_after_kv && ranges.continued) store_transposed(from_left, call.d_after_kv, call.d_after_z);
        if (call.d_log_decay) call.d_log_decay[head] = d_log;
    }

  private:
    // Turns d_out of a row, in place, into dn; returns d_total.
    float divide_gradient(int64_t row, bool is_real, float *d) const {
        const float total = call.totals[head * call.length + row];
        divide(d, divisor(call, total), s.dp);
        return d_divisor(call, total, is_real, d, call.out.rows(b, h).at(row));
    }

    // One sweep over the blocks. With `keys`, the state S of keys gives gradients of queries, and its derivative D that of r. With
    // `gradients`, G, the gradient of the state that runs the other way, gives gradients of keys and values. The sweep from the left also
    // does the pairs within blocks, and sets the gradients of tokens, to which the other adds.
    void sweep(bool from_right, bool keys, bool gradients, const State &g) {
        const State state = transposed(), derivative = transposed();
        if (from_right ? ranges.continued : ranges.continues)
            load_transposed(of_head(from_right ? call.after_kv : call.kv_in, s.m * s.d), of_head(from_right ? call.after_z : call.z_in, s.m), state);
        const Steps &of_state = from_right ? powers.right : powers.left, &of_gradient = from_right ? powers.left : powers.right;
        each_block(from_right, [&](const Range &range) {
            if (from_right ? range.last : range.first) state.clear(), derivative.clear(), g.clear();
            look(range);
            const int64_t first = keeps_rows ? range.begin : 0;
            dfq = all_dq + first * s.f_row, dfk = all_dk + first * s.f_row, dv = all_dv + first * s.v_row;
            for (int64_t i = 0; call.queries && i < n; i++) {
                const int64_t t = range.begin + i, row = walk.row(t);
                walk.is_real(t) ? copy_row(call.d_out.rows(b, h).at(row), dn + i * s.v_row, s.d) : zero(dn + i * s.v_row, s.d);
                d_total[i] = divide_gradient(row, walk.is_real(t), dn + i * s.v_row);
            }
            if (!from_right && call.queries) {
                pairs_back();
                globals_back(range);
            } else if (!keeps_rows) {
                zero(dfq, n * s.f_row), zero(dfk, n * s.f_row), zero(dv, n * s.v_row);
            }
            if (keys && call.queries) {
                for (int64_t i = 0; i < n; i++) scaled(dn + i * s.v_row, of_state.read_power[i], dnr + i * s.v_row, s.dp);
                queries_back(state, of_state);
                if (call.d_log_decay) d_log += read_products(derivative, of_state, [](int64_t) { return 1; });
            }
            if (gradients) keys_back(g, of_gradient, !from_right && call.queries);
            if (keys && (call.queries || call.d_log_decay)) absorb_keys(state, derivative, of_state);
            if (!keeps_rows || sweeps > 1) put(range, from_right && !keeps_rows);
        });
        if (keys && call.d_log_decay && from_right == static_cast<bool>(call.reverse)) {  // the returned state depends on r too
            const float *d_kv = of_head(call.d_kv, s.m * s.d), *d_z = of_head(call.d_z, s.m);
            for (ptrdiff_t i = 0; i < s.m; i++)
                for (ptrdiff_t j = 0; j < s.d; j++) d_log += static_cast<double>(d_kv[i * s.d + j]) * derivative.kv[j * s.f_row + i];
            d_log += dot(d_z, derivative.z, s.m);
        }
    }
    // States d x m, whose rows are those of features.
    State transposed() { return State(s.d * s.f_row, s.mp, arena); }
    void load_transposed(const float *kv, const float *z, const State &state) const {
        for (ptrdiff_t i = 0; kv && i < s.m; i++)
            for (ptrdiff_t j = 0; j < s.d; j++) state.kv[j * s.f_row + i] = kv[i * s.d + j];
        if (z) copy_row(z, state.z, s.m);
    }
    void store_transposed(const State &state, float *kv, float *z) const {
        for (ptrdiff_t i = 0; i < s.m; i++)
            for (ptrdiff_t j = 0; j < s.d; j++) kv[(head * s.m + i) * s.d + j] = state.kv[j * s.f_row + i];
        copy_row(state.z, z + head * s.m, s.m);
    }
    // Gradients from the pairs within the block: sets dfq, dfk and dv.
    void pairs_back() {
        this->pairs();
        transpose(v, s.v_row, n, s.d, s.panels(v_t, s.d, n));
        multiply(n, padded(n), s.d, dn, s.v_row, 1, s.panels(v_t, s.d, n), s.rows(dp, p_row), NEW);
        for (int64_t i = 0; i < n; i++) {
            float *row = dp + i * p_row;
            for (int64_t j = 0; j < n; j += W) store(row + j, load(row + j) + d_total[i]);
            for (int64_t j = 0; call.d_log_decay && j < (call.mode == CAUSAL ? i : n); j++)
                d_log += static_cast<double>(row[j]) * p[i * p_row + j] * std::abs(powers.steps[i] - powers.steps[j]);
        }
        this->decay_and_hide(dp);
        multiply(n, s.dp, n, p, 1, p_row, s.rows(dn, s.v_row), s.rows(dv, s.v_row), NEW);
        multiply(n, s.mp, n, dp, p_row, 1, s.rows(fk, s.f_row), s.rows(dfq, s.f_row), NEW);
        multiply(n, s.mp, n, dp, 1, p_row, s.rows(fq, s.f_row), s.rows(dfk, s.f_row), NEW);
    }
    // Gradients of queries from reading S, transposed. dnr is dn decayed to the state.
    void queries_back(const State &state, const Steps &steps) {
        if (call.d_log_decay) d_log += read_products(state, steps, [&](int64_t i) { return steps.read[i]; });
        multiply(n, s.mp, s.d, dnr, s.v_row, 1, s.rows(state.kv, s.f_row), s.rows(dfq, s.f_row), ADD);
        for (int64_t i = 0; i < n; i++) add_scaled(dfq + i * s.f_row, state.z, steps.read_power[i] * d_total[i], s.mp);
    }
    // The sum over queries of weight(i) times what the state contributes to the loss.
    template <typename Weight>
    double read_products(const State &state, const Steps &steps, Weight weight) {
        double products = 0;
        multiply(n, s.mp, s.d, dnr, s.v_row, 1, s.rows(state.kv, s.f_row), s.rows(df, s.f_row), NEW);
        for (int64_t i = 0; i < n; i++) {
            add_scaled(df + i * s.f_row, state.z, steps.read_power[i] * d_total[i], s.mp);
            products += weight(i) * static_cast<double>(dot(fq + i * s.f_row, df + i * s.f_row, s.mp));
        }
        return products;
    }
    // Gradients of keys and values from G, and G beyond the block. It is the gradient of a state that these keys wrote and its queries read.
    void keys_back(const State &g, const Steps &steps, bool is_transposed) {
        const Matrix keys = s.panels(fk_t, s.m, n);
        if (!is_transposed) transpose(fk, s.f_row, n, s.m, keys);
        for (int64_t i = 0; i < n; i++) scaled(v + i * s.v_row, steps.write_power[i], w + i * s.v_row, s.dp);
        multiply(n, s.mp, s.d, w, s.v_row, 1, s.rows(g.kv, s.f_row), s.rows(dfk, s.f_row), ADD, this->ahead(true));
        multiply(s.d, padded(n), s.m, g.kv, s.f_row, 1, keys, s.rows(v_t, p_row), NEW);
        transpose(v_t, p_row, s.d, n, s.rows(w, s.v_row));
        for (int64_t i = 0; i < n; i++) {
            add_scaled(dfk + i * s.f_row, g.z, steps.write_power[i], s.mp);
            add_scaled(dv + i * s.v_row, w + i * s.v_row, steps.write_power[i], s.dp);
        }
        g.decay(powers.across);
        if (!call.queries) return;
        for (int64_t i = 0; i < n; i++) scaled(dn + i * s.v_row, steps.read_power[i], w + i * s.v_row, s.dp);
        multiply(s.d, s.mp, n, w, 1, s.v_row, s.rows(fq, s.f_row), s.rows(g.kv, s.f_row), ADD);
        add_rows(g.z, fq, s.f_row, n, s.mp, [&](ptrdiff_t i) { return steps.read_power[i] * d_total[i]; });
    }
    // S <- r^C S + sum of r^w f(k) v^T, and by log r, D <- r^C (D + C S) + sum of w r^w f(k) v^T.
    void absorb_keys(const State &state, const State &derivative, const Steps &steps) {
        if (call.d_log_decay) {
            float by[BLOCK];
            for (int64_t i = 0; i < n; i++) by[i] = steps.write[i] * steps.write_power[i];
            add_scaled(derivative.kv, state.kv, powers.total, state.size);
            add_scaled(derivative.z, state.z, powers.total, s.mp);
            absorb_transposed(derivative, by);
        }
        absorb_transposed(state, steps.write_power);
    }
    void absorb_transposed(const State &state, const float *by) {
        state.decay(powers.across);
        for (int64_t i = 0; i < n; i++) scaled(v + i * s.v_row, by[i], w + i * s.v_row, s.dp);
        multiply(s.d, s.mp, n, w, 1, s.v_row, s.rows(fk, s.f_row), s.rows(state.kv, s.f_row), ADD);
        add_rows(state.z, fk, s.f_row, n, s.mp, [&](ptrdiff_t i) { return by[i]; });
    }
    // Gradients from a query and a key with weight 1.
    void pair_back(const float *q, const float *query_dn, float query_d_total, float *d_q, const float *k, const float *value, float *d_k, float *d_value) const {
        const float d_score = dot(query_dn, value, s.dp) + query_d_total;
        add_scaled(d_q, k, d_score, s.mp);
        add_scaled(d_k, q, d_score, s.mp);
        add_scaled(d_value, query_dn, dot(q, k, s.mp), s.dp);
    }
    void globals_back(const Range &range) {
        each_global(range.segment, [&](size_t g) {
            for (int64_t i = 0; i < n; i++) {
                if (!walk.is_real(range.begin + i)) continue;
                const int64_t f = i * s.f_row, x = i * s.v_row, gf = g * s.mp, gx = g * s.dp;
                pair_back(fq + f, dn + x, d_total[i], dfq + f, gk + gf, gv + gx, g_dk + gf, g_dv + gx);
                pair_back(gq + gf, g_dn + gx, g_dtotal[g], g_dq + gf, fk + f, v + x, dfk + f, dv + x);
            }
        });
    }
    void put_globals() {
        this->each_global_pair([&](size_t g, size_t other) {
            const int64_t f = g * s.mp, x = g * s.dp, of = other * s.mp, ox = other * s.dp;
            pair_back(gq + f, g_dn + x, g_dtotal[g], g_dq + f, gk + of, gv + ox, g_dk + of, g_dv + ox);
        });
        for (size_t g = 0; g < ranges.globals.size(); g++) {
            const GlobalToken &token = ranges.globals[g];
            token_back(token, of_keys, call.k.rows(b, h).at(token.row), g_dk + g * s.mp, call.d_k.rows(b, h).at(token.row));
            token_back(token, of_queries, call.q.rows(b, h).at(token.row), g_dq + g * s.mp, call.d_q.rows(b, h).at(token.row));
            copy_row(g_dv + g * s.dp, call.d_v.rows(b, h).at(token.row), s.d);
        }
    }
    void token_back(const GlobalToken &token, Turner &turner, const float *x, const float *d, float *d_x) {
        if (turner.turns_nothing()) return back_row<MAP>(x, d, d_x, s.m);
        copy_row(d, near, s.m);
        turner.rows<AS_IT_IS, true>(this->run_of(token), near, s.f_row, df, s.f_row);
        back_row<MAP>(x, df, d_x, s.m);
    }
    // Writes the gradients of the block's tokens, or adds them to those of the sweep before.
    void put(const Range &range, bool adds) {
        const int64_t begin = range.begin, end = range.end;
        const Rows q = call.q.rows(b, h), k = call.k.rows(b, h), d_q = call.d_q.rows(b, h), d_k = call.d_k.rows(b, h), d_v = call.d_v.rows(b, h);
        if (adds) {
            put_values<true>(s, walk, dv, d_v, begin, end);
            back<MAP, FAR, true>(s, walk, of_keys, near, k, dfk, d_k, begin, end);
            if (call.queries && call.mode == TWO_SIDED) back<MAP, FAR, true>(s, walk, of_queries, near, q, dfq, d_q, begin, end);
        } else {
            put_values(s, walk, dv, d_v, begin, end);
            back<MAP, FAR>(s, walk, of_keys, near, k, dfk, d_k, begin, end);
            if (call.queries) back<MAP, FAR>(s, walk, of_queries, near, q, dfq, d_q, begin, end);
        }
    }
};

template <int MAP>
static void scan_back(const Call &call, int64_t b, int64_t h) {
    ScanBack<MAP>(call, b, h).run();
}

}  // namespace ISA

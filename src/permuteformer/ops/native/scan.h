// Causal attention of one head: a carry goes along the blocks of tokens; each reads it, adds its own pairs, and joins it.
#pragma once

#include "total.h"

namespace ISA {

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

    Scan(const Call &call, Arena &arena) : s(call), p_row(BLOCK + W) {
        fq = arena.zeros<float>(BLOCK * s.f_row), fk = arena.zeros<float>(BLOCK * s.f_row);
        fk_t = arena.zeros<float>(Sizes::panel_size(s.mp, BLOCK));
        v = arena.zeros<float>(BLOCK * s.v_row), w = arena.zeros<float>(BLOCK * s.v_row), o = arena.zeros<float>(BLOCK * s.v_row);
        p = arena.zeros<float>(BLOCK * p_row);
        kv = arena.zeros<float>(s.m * s.dp), z = arena.zeros<float>(s.mp);
    }

    // Weights of pairs in the block: phi(q)·phi(k) r^(i-j), and nothing for keys after the query.
    void weights(const Powers &powers, int64_t n) {
        transpose(fk, s.f_row, n, s.m, s.panels(fk_t, s.m));
        multiply(n, padded(n), s.m, fq, s.f_row, 1, s.panels(fk_t, s.m), s.rows(p, p_row), NEW);
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
        if (is_finite(v, n * s.v_row)) return multiply(n, s.dp, n, p, p_row, 1, s.rows(v, s.v_row), s.rows(o, s.v_row), NEW);
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
        multiply(s.m, s.dp, n, fk, 1, s.f_row, s.rows(w, s.v_row), s.rows(kv, s.dp), ADD);
        add_rows(z, fk, s.f_row, n, s.mp, [&](ptrdiff_t i) { return powers.write(i); });
    }
};

template <int MAP>
static void scan(const Call &call, int64_t b, int64_t h) {
    const int64_t head = b * call.heads + h, length = call.length;
    Arena arena;
    Scan scan(call, arena);
    const Sizes &s = scan.s;
    float *carried = arena.zeros<float>(BLOCK * s.v_row);
    float *kv = call.kv + head * s.m * s.d, *z = call.z + head * s.m;
    carry_in(s, kv, z, scan.kv, scan.z);
    Powers powers(call.log_decay ? call.log_decay + h : nullptr);
    Turner of_keys(call, h, arena), of_queries(call, h, arena);
    Walk walk(call, b, 0, KEYS, of_keys.axes, arena);
    float *near = s.few_rows(arena);
    const int64_t groups = (length + BLOCK * GROUP - 1) / (BLOCK * GROUP), size = s.m * s.d + s.m;
    for (int64_t t = 0; t < length; t += BLOCK) {
        const int64_t stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
        if (call.kept && t % (BLOCK * GROUP) == 0) {
            float *to = call.kept + (head * groups + t / (BLOCK * GROUP)) * size;
            carry_out(s, scan.kv, scan.z, to, to + s.m * s.d);
        }
        walk.look(t, stop);
        powers.count(walk, t, n);
        fill<MAP, FAR>(s, walk, of_keys, near, call.k.rows(b, h), t, stop, scan.fk);
        fill<MAP, FAR>(s, walk, of_queries, near, call.q.rows(b, h), t, stop, scan.fq);
        fill_values(s, walk, call.v.rows(b, h), t, stop, scan.v);
        scan.weights(powers, n);
        scan.mix(n);
        multiply(n, s.dp, s.m, scan.fq, s.f_row, 1, s.rows(scan.kv, s.dp), s.rows(carried, s.v_row), NEW);
        for (int64_t i = 0; i < n; i++) {
            const float total = powers.read(i) * dot(scan.fq + i * s.f_row, scan.z, s.mp) + sum_row(scan.p + i * scan.p_row, padded(i + 1));
            add_scaled(scan.o + i * s.v_row, carried + i * s.v_row, powers.read(i), s.dp);
            divide(scan.o + i * s.v_row, divisor(call, total), s.dp);
            copy_row(scan.o + i * s.v_row, call.out.rows(b, h).at(t + i), s.d);
        }
        scan.write(powers, n);
    }
    carry_out(s, scan.kv, scan.z, kv, z);
}

// One token joins the carry and reads it: two passes over the carry, and nothing beside.
template <int MAP>
static void step(const Call &call, int64_t b, int64_t h) {
    const Sizes s(call);
    const int64_t head = b * call.heads + h;
    Arena arena;
    float *fq = arena.zeros<float>(s.f_row), *fk = arena.zeros<float>(s.f_row), *v = arena.zeros<float>(s.dp), *o = arena.zeros<float>(s.dp);
    Turner turner(call, h, arena);
    Walk walk(call, b, 0, KEYS, turner.axes, arena);
    walk.look(0, 1);
    float *near = s.few_rows(arena);
    fill<MAP, FAR>(s, walk, turner, near, call.q.rows(b, h), 0, 1, fq);
    fill<MAP, FAR>(s, walk, turner, near, call.k.rows(b, h), 0, 1, fk);
    fill_values(s, walk, call.v.rows(b, h), 0, 1, v);
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
    float *out = call.out.rows(b, h).x;
    const float by = divisor(call, sum);
    for (ptrdiff_t j = 0; j < s.d; j++) out[j] = o[j] / by;
}

template <int MAP>
static void scan_back(const Call &call, int64_t b, int64_t h) {
    const int64_t head = b * call.heads + h, length = call.length, blocks = (length + BLOCK - 1) / BLOCK;
    const Sizes s(call);
    const ptrdiff_t turned = Sizes::panel_size(s.d, s.mp), side = BLOCK + W, carry = s.m * s.dp + s.mp;
    Arena arena;
    Scan scan(call, arena);
    float *dfq = arena.zeros<float>(BLOCK * s.f_row), *dfk = arena.zeros<float>(BLOCK * s.f_row);
    float *dn = arena.zeros<float>(BLOCK * s.v_row), *dv = arena.zeros<float>(BLOCK * s.v_row), *dp = arena.zeros<float>(BLOCK * side);
    float *kv_t = arena.zeros<float>(turned), *d_kv_t = arena.zeros<float>(turned), *v_t = arena.zeros<float>(Sizes::panel_size(s.d, BLOCK));
    float *d_kv = arena.zeros<float>(s.m * s.dp), *d_z = arena.zeros<float>(s.mp);
    float *met = arena.zeros<float>(GROUP * carry);  // carries that the blocks of a group met
    carry_in(s, call.d_kv + head * s.m * s.d, call.d_z + head * s.m, d_kv, d_z);
    Turner of_keys(call, h, arena), of_queries(call, h, arena);
    float *near = s.few_rows(arena);
    Walk walk(call, b, 0, KEYS, of_keys.axes, arena);
    Powers powers(call.log_decay ? call.log_decay + h : nullptr);
    const int64_t groups = (blocks + GROUP - 1) / GROUP, size = s.m * s.d + s.m;
    std::vector<int64_t> starts(groups);  // places of the first tokens of groups
    for (int64_t group = 0; group < groups; group++) {
        starts[group] = walk.at();
        const int64_t first = group * GROUP * BLOCK, last = first + GROUP * BLOCK;
        walk.pass(first, last < length ? last : length);
    }
    double d_log = 0;
    for (int64_t group = groups - 1; group >= 0; group--) {
        const int64_t first = group * GROUP, last = first + GROUP < blocks ? first + GROUP : blocks;
        const float *from = call.kept + (head * groups + group) * size;
        carry_in(s, from, from + s.m * s.d, scan.kv, scan.z);
        int64_t places[GROUP];
        {  // forwards again, for the carries alone
            walk.go_to(starts[group]);
            for (int64_t block = first; block < last; block++) {
                const int64_t t = block * BLOCK, stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
                float *to = met + (block - first) * carry;
                copy_row(scan.kv, to, s.m * s.dp);
                copy_row(scan.z, to + s.m * s.dp, s.mp);
                places[block - first] = walk.at();
                if (block + 1 == last) break;
                walk.look(t, stop);
                powers.count(walk, t, n);
                fill<MAP, FAR>(s, walk, of_keys, near, call.k.rows(b, h), t, stop, scan.fk);
                fill_values(s, walk, call.v.rows(b, h), t, stop, scan.v);
                scan.write(powers, n);
            }
        }
        for (int64_t block = last - 1; block >= first; block--) {
            const int64_t t = block * BLOCK, stop = t + BLOCK < length ? t + BLOCK : length, n = stop - t;
            float *kv = met + (block - first) * carry, *z = kv + s.m * s.dp;
            walk.go_to(places[block - first]);
            walk.look(t, stop);
            powers.count(walk, t, n);
            fill<MAP, FAR>(s, walk, of_keys, near, call.k.rows(b, h), t, stop, scan.fk);
            fill<MAP, FAR>(s, walk, of_queries, near, call.q.rows(b, h), t, stop, scan.fq);
            fill_values(s, walk, call.v.rows(b, h), t, stop, scan.v);
            fill_values(s, walk, call.d_out.rows(b, h), t, stop, dn);
            scan.weights(powers, n);

            float d_total[BLOCK];
            for (int64_t i = 0; i < n; i++) {
                const float total = powers.read(i) * dot(scan.fq + i * s.f_row, z, s.mp) + sum_row(scan.p + i * scan.p_row, padded(i + 1));
                divide(dn + i * s.v_row, divisor(call, total), s.dp);
                d_total[i] = d_divisor(call, total, walk.is_shown(t + i), dn + i * s.v_row, call.out.rows(b, h).at(t + i));
            }
            // Of the weights, before their decay.
            transpose(scan.v, s.v_row, n, s.d, s.panels(v_t, s.d));
            multiply(n, padded(n), s.d, dn, s.v_row, 1, s.panels(v_t, s.d), s.rows(dp, side), NEW);
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j <= i; j++) dp[i * side + j] += d_total[i];
            if (call.d_log_decay)
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j <= i; j++)
                        d_log += static_cast<double>(dp[i * side + j]) * scan.p[i * scan.p_row + j] * (powers.steps[i] - powers.steps[j]);
            scan.hide(powers, dp, n);

            // Queries: from the pairs, and from the carry. d_n and what it reads are decayed to each token.
            multiply(n, s.dp, n, scan.p, 1, scan.p_row, s.rows(dn, s.v_row), s.rows(dv, s.v_row), NEW);
            multiply(n, s.mp, n, dp, side, 1, s.rows(scan.fk, s.f_row), s.rows(dfq, s.f_row), NEW);
            multiply(n, s.mp, n, dp, 1, side, s.rows(scan.fq, s.f_row), s.rows(dfk, s.f_row), NEW);
            for (int64_t i = 0; i < n; i++) {
                scale(dn + i * s.v_row, powers.read(i), s.dp);
                d_total[i] *= powers.read(i);
            }
            transpose(kv, s.dp, s.m, s.d, s.panels(kv_t, s.d));
            multiply(n, s.mp, s.d, dn, s.v_row, 1, s.panels(kv_t, s.d), s.rows(dfq, s.f_row), ADD);
            for (int64_t i = 0; i < n; i++) add_scaled(dfq + i * s.f_row, z, d_total[i], s.mp);
            if (call.d_log_decay) {
                multiply(n, s.dp, s.m, scan.fq, s.f_row, 1, s.rows(kv, s.dp), s.rows(scan.o, s.v_row), NEW);
                for (int64_t i = 0; i < n; i++)
                    d_log += powers.steps[i] * (static_cast<double>(dot(dn + i * s.v_row, scan.o + i * s.v_row, s.dp)) +
                                                static_cast<double>(d_total[i]) * dot(scan.fq + i * s.f_row, z, s.mp));
            }

            // Keys and values: what the carry beyond the block is worth.
            transpose(d_kv, s.dp, s.m, s.d, s.panels(d_kv_t, s.d));
            for (int64_t i = 0; i < n; i++)
                for (ptrdiff_t j = 0; j < s.dp; j += W) store(scan.w + i * s.v_row + j, load(scan.v + i * s.v_row + j) * all(powers.write(i)));
            multiply(n, s.mp, s.d, scan.w, s.v_row, 1, s.panels(d_kv_t, s.d), s.rows(dfk, s.f_row), ADD);
            multiply(n, s.dp, s.m, scan.fk, s.f_row, 1, s.rows(d_kv, s.dp), s.rows(scan.o, s.v_row), NEW);
            for (int64_t i = 0; i < n; i++) {
                add_scaled(dfk + i * s.f_row, d_z, powers.write(i), s.mp);
                add_scaled(dv + i * s.v_row, scan.o + i * s.v_row, powers.write(i), s.dp);
                if (call.d_log_decay)
                    d_log += (powers.total - powers.steps[i]) *
                             (static_cast<double>(dot(scan.w + i * s.v_row, scan.o + i * s.v_row, s.dp)) +
                              static_cast<double>(powers.write(i)) * dot(scan.fk + i * s.f_row, d_z, s.mp));
            }
            put_values(s, walk, dv, call.d_v.rows(b, h), t, stop);

            // The carry that the block met.
            if (call.d_log_decay)
                d_log += powers.total * static_cast<double>(powers.across()) *
                         (static_cast<double>(dot(d_kv, kv, s.m * s.dp)) + static_cast<double>(dot(d_z, z, s.mp)));
            if (powers.across() != 1) {
                scale(d_kv, powers.across(), s.m * s.dp);
                scale(d_z, powers.across(), s.mp);
            }
            multiply(s.m, s.dp, n, scan.fq, 1, s.f_row, s.rows(dn, s.v_row), s.rows(d_kv, s.dp), ADD);
            add_rows(d_z, scan.fq, s.f_row, n, s.mp, [&](ptrdiff_t i) { return d_total[i]; });
            back<MAP, FAR>(s, walk, of_queries, near, call.q.rows(b, h), dfq, call.d_q.rows(b, h), t, stop);
            back<MAP, FAR>(s, walk, of_keys, near, call.k.rows(b, h), dfk, call.d_k.rows(b, h), t, stop);
        }
    }
    carry_out(s, d_kv, d_z, call.d_kv + head * s.m * s.d, call.d_z + head * s.m);
    if (call.d_log_decay) call.d_log_decay[head] = d_log;
}

}  // namespace ISA

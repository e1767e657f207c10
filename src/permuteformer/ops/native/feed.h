// A feed-forward network with its norm before it, dropout and the sum after it, block by block: what is between its two linear maps exists for a
// block of rows only, a part of it at a time, and is found again for the gradients.
#pragma once

#include "activation.h"
#include "drop.h"
#include "linear.h"
#include "total.h"

namespace ISA {

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
        add_up(n, width, d_out, d_contract_bias);
        parts_of_hidden(feed, [&](ptrdiff_t first, ptrdiff_t some) {
            multiply(n, some, width, normed.block.x, normed.block.row, 1, expand.weight(first), hidden.matrix(), To(expand.data + first));
            for (int64_t i = 0; i < n; i++) activate(static_cast<Activation>(feed.activation), hidden.at(i), slope.at(i), some);
            add_products(n, width, some, d_out, hidden.matrix(), d_contract + first, all_hidden);
            multiply(n, some, width, d_out.x, d_out.row, 1, by_rows(feed.contract.weight + first, all_hidden), d_hidden.matrix(), NEW);
            for (int64_t i = 0; i < n; i++)
                for (ptrdiff_t j = 0; j < some; j += W) store(d_hidden.at(i) + j, load(d_hidden.at(i) + j) * load(slope.at(i) + j));
            add_up(n, some, d_hidden, d_expand_bias + first);
            add_products(n, some, width, d_hidden, normed.block.matrix(), d_expand + first * width, width);
            multiply(n, width, some, d_hidden.x, d_hidden.row, 1, by_rows(feed.expand.weight + first * width, width), d_normed.matrix(), first > 0);
        });
        normed.back(n, x, d_normed, d_y, feed.d_x + t * width, d_norm, d_norm_bias);
    });
}

}  // namespace ISA

// Norms and linear maps of a block of rows in cache, and their gradients. Widths are multiples of a vector, unless said otherwise.
#pragma once

#include "call.h"
#include "rows.h"

namespace ISA {

// Rows of a block, of which each is a little longer than it need be: else, as widths are powers of two, they fight for the same places of the
// first cache.
struct Block {
    float *x;
    ptrdiff_t row;

    Block(ptrdiff_t width, Arena &arena) : x(arena.take<float>(BLOCK * (padded(width) + W))), row(padded(width) + W) {}
    float *at(ptrdiff_t i) const { return x + i * row; }
    Matrix matrix(ptrdiff_t column = 0) const { return {x + column, row, PANEL}; }
    // As rows of the tokens from t on.
    Rows from(int64_t t, ptrdiff_t column = 0) const { return {x + column - t * row, row}; }
};

// A matrix as torch has it, row after row.
static Matrix by_rows(const float *x, ptrdiff_t row) { return {const_cast<float *>(x), row, PANEL}; }

// A linear map as products want it: the bias in a row, then the weight turned round, panel by panel. Any sizes.
struct Packed {
    float *data;
    ptrdiff_t out, in;

    static ptrdiff_t columns(ptrdiff_t out) { return (out + PANEL - 1) / PANEL * PANEL; }
    // From an output, which is a multiple of PANEL, and an input on.
    Matrix weight(ptrdiff_t output = 0, ptrdiff_t input = 0) const {
        return {data + columns(out) + output * in + input * PANEL, PANEL, in * PANEL};
    }
    // y = x W^T + b
    void operator()(ptrdiff_t rows, const Block &x, const Block &y) const {
        multiply(rows, padded(out), in, x.x, x.row, 1, weight(), y.matrix(), To(data));
    }
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

// d_weight, out x in, and d_bias of it, from the gradients of what came out and from what went in.
static void add_products(ptrdiff_t rows, ptrdiff_t out, ptrdiff_t in, const Block &d_y, Matrix x, float *d_weight, ptrdiff_t d_row) {
    multiply(out, in, rows, d_y.x, 1, d_y.row, x, by_rows(d_weight, d_row), ADD);
}

static void add_up(ptrdiff_t rows, ptrdiff_t width, const Block &d_y, float *d_bias) {
    add_rows(d_bias, d_y.x, d_y.row, rows, width, [](ptrdiff_t) { return 1.0f; });
}

// A norm of the rows of a block, which remembers what it found of them.
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
    // The gradients of x, of those of what it gave, on others (null for none); and of the norm's weight and bias, which are added to.
    void back(ptrdiff_t rows, const float *x, const Block &d, const float *others, float *d_x, float *d_weight, float *d_bias) const {
        for (ptrdiff_t i = 0; i < rows; i++, x += width, d_x += width, others += others ? width : 0) {
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
                store(d_x + j, others ? load(others + j) + gradient : gradient);
            }
        }
    }
};

}  // namespace ISA

// One call of the kernel: tensors as they lie in memory, and what is to be done with them. The same for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

// Rows of tokens, token numbers apart.
struct Rows {
    float *x;
    int64_t token;

    float *at(int64_t t) const { return x + t * token; }
};

// Numbers b h l and then side by side; strides are in numbers. Null data: there is no such tensor.
struct Tensor4 {
    float *data;
    int64_t batch, head, token;

    Rows rows(int64_t b, int64_t h) const { return {data + b * batch + h * head, token}; }
};

// Whole numbers b l and then a, side by side; null data: there are none.
struct Positions {
    const int64_t *data;
    int64_t batch, token;
};

// Features begin … begin + length - 1 of a head, which the positions' number of this axis turns.
struct Cycle {
    int32_t begin, length, axis;
};

// Every field has 8 bytes: Python writes them as one array, in the order of FIELDS in native/__init__.py.
struct Call {
    int64_t batch, heads, length, queries, features, values, map, normalize, threads;
    Tensor4 q, k, v, out;
    float *kv, *z;           // b h m d and b h m: the carry, before and then after
    const Cycle *cycles;     // of all heads
    const int32_t *of_head;  // h + 1: where a head's cycles begin; or null without a permutation
    const int64_t *start;    // b: the position of the first token that is shown, where positions are counted; or null for 0
    Positions positions;     // none: counted from start
    Positions query_positions;  // of queries that are of other tokens than the keys, all of them shown; none: of the same
    const uint8_t *shown;       // b l, or null for all
    int64_t shown_batch;
    const float *log_decay;  // h, or null
    float *kept;             // causal, for the backward pass: carries between groups of blocks, b h groups m (d + 1); or null

    // Backward
    Tensor4 d_out, d_q, d_k, d_v;
    float *d_kv, *d_z;    // of the carry after, and then of that before
    double *d_log_decay;  // b h, or null
};

// Which numbers are dropped: so many of 2^32, by a seed.
struct Chance {
    int64_t seed, dropped;
};

// Dropout of rows that lie side by side, of which each has its own noise. 8 bytes a field too.
struct Drop {
    const float *x;
    float *y;
    int64_t rows, width;
    Chance chance;
    int64_t threads;
};

// A norm of rows, and a linear map of them: out x in, side by side, as torch has them. A bias may be null.
struct Norm {
    const float *weight, *bias;
    double epsilon;
};
struct Linear {
    const float *weight, *bias;
};

// x + dropout(contract(activation(expand(norm(x))))), of rows that lie side by side. Sizes are multiples of ALIGNED.
struct Feed {
    int64_t rows, width, hidden, activation, threads;
    const float *x;
    float *y;
    Norm norm;
    Linear expand, contract;
    Chance chance;
    // Backward. d_weights: of expand, its bias, of contract, its bias, the norm's weight and bias, one after the other; added to.
    const float *d_y;
    float *d_x, *d_weights;
};

// queries + dropout(output(attention(norm(queries), norm(x)))), of rows that lie side by side: b l width and b n width, which may be the same.
// Sizes of all heads together are multiples of ALIGNED.
struct Attend {
    Call call;  // of attention itself, whose q, k, v and out are nowhere
    int64_t width;
    const float *x, *queries;
    float *y, *mixed;  // b n width; mixed is what goes into output, kept for the backward pass, or null
    Norm norm;
    Linear query, key, value, output;
    Chance chance;
    // Backward. d_reading: of query, its bias, of output, its bias, the norm's weight and bias; d_keys: of key, its bias, of value, its bias, the norm's
    // weight and bias; one after the other; added to.
    const float *d_y;
    float *d_x, *d_queries, *d_reading, *d_keys;
};
constexpr int64_t ALIGNED = 16;

// Weights as products want them: the linear maps of a feed-forward network, or of attention, where those of queries and keys are for each head.
struct Packs {
    float *first, *second, *third, *fourth;
};

// What an instruction set has to offer. Each function does the work of one head of one row, or of some of its tokens.
struct Kernels {
    // Bidirectional: keys begin … end add up to kv and z, which are this part's own; queries read the call's.
    void (*absorb)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end, float *kv, float *z);
    void (*read)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end);
    void (*read_back)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end, float *d_kv, float *d_z);
    void (*absorb_back)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end);
    // Causal, all tokens.
    void (*scan)(const Call &, int64_t b, int64_t h);
    void (*scan_back)(const Call &, int64_t b, int64_t h);
    // Causal, one token.
    void (*step)(const Call &, int64_t b, int64_t h);
    void (*drop)(const Drop &, int64_t begin, int64_t end);
    // A linear map, out x in, to what products want: packed_size numbers.
    void (*pack)(const Linear &, int64_t out, int64_t in, float *to);
    // Rows begin … end; sums are of the gradients of weights, this part's own.
    void (*feed)(const Feed &, const Packs &, int64_t begin, int64_t end);
    void (*feed_back)(const Feed &, const Packs &, int64_t begin, int64_t end, float *sums);
    // Tokens begin … end of one row, all heads.
    void (*attend_absorb)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *kv, float *z);
    void (*attend_read)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end);
    void (*attend_read_back)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *d_kv, float *d_z, float *sums);
    void (*attend_absorb_back)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *sums);
};

// Numbers of a packed linear map: its bias, and its weight in panels, which are of 64 columns at most.
inline int64_t packed_size(int64_t out, int64_t in) { return (in + 1) * ((out + 63) / 64 * 64); }

constexpr int64_t BLOCK = 64;  // tokens whose features exist at a time
constexpr int64_t GROUP = 16;  // blocks between carries that the backward pass finds again

// By feature map, for each instruction set that was compiled.
namespace baseline {
const Kernels *kernels(int64_t map);
}
namespace avx2 {
const Kernels *kernels(int64_t map);
}
namespace avx512 {
const Kernels *kernels(int64_t map);
}

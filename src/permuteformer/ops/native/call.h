// The structs that Python passes to the kernel: the same for all instruction sets. native/__init__.py has the same fields in the same order.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int64_t BLOCK = 64;  // tokens whose features exist at a time, at most

// Rows of floats, one per token, `token` floats apart.
struct Rows {
    float *x;
    int64_t token;

    float *at(int64_t t) const { return x + t * token; }
};

// A tensor b h l d whose last dimension is contiguous; strides count floats. Null data: no such tensor.
struct Tensor4 {
    float *data;
    int64_t batch, head, token;

    Rows rows(int64_t b, int64_t h) const { return {data + b * batch + h * head, token}; }
};

// Positions b l a with contiguous axes; null data: counted.
struct Positions {
    const int64_t *data;
    int64_t batch, token;
};

// Features begin … begin + length - 1 of a head form a cycle, which positions on `axis` rotate.
struct Cycle {
    int32_t begin, length, axis;
};

enum Mode : int64_t { TOTAL = 0, CAUSAL = 1, TWO_SIDED = 2 };

// One call of linear attention. Tensors without strides are contiguous; any may be null where the comment says so.
struct Call {
    int64_t batch, heads, length, queries, features, values, feature_map, normalize, mode, reverse, threads;
    Tensor4 q, k, v, out;
    const float *kv_in, *z_in;        // b h m d and b h m: the state before the first token; or null
    const float *after_kv, *after_z;  // the state of tokens after the last; or null
    float *kv, *z;                    // the state after the last token (TWO_SIDED reverse: before the first)
    const Cycle *cycles;              // of all heads
    const int32_t *of_head;           // h + 1: where the cycles of each head begin; or null without a permutation
    const int64_t *start;             // b: the position of the first real token, where positions are counted; or null for 0
    Positions positions;
    Positions query_positions;    // of queries that are not the tokens of the keys; they are not masked
    const uint8_t *mask;          // b l, or null: all real
    const uint8_t *global_mask;   // b l, or null
    const int64_t *segments;      // b l, or null
    const int64_t *state_segment;  // b: the segment of the state before; or null
    const int64_t *after_segment;  // b: the segment of the state after; or null
    const int64_t *orders;         // axes b l: the tokens in the order of each axis; or null
    int64_t axes;                  // of orders
    const double *log_decay;       // h, or null
    float *totals;                 // b h l: sums of weights, for the backward pass; null for TOTAL

    // Backward: gradients of the results, then of the inputs.
    Tensor4 d_out;
    const float *d_kv, *d_z;
    Tensor4 d_q, d_k, d_v;
    float *d_kv_in, *d_z_in, *d_after_kv, *d_after_z;
    double *d_log_decay;  // b h, or null

    const int64_t *order(int64_t b, int64_t h) const { return orders ? orders + (h % axes * batch + b) * length : nullptr; }
};

// Dropout: `dropped` of 2^32 hash values drop a number.
struct Chance {
    int64_t seed, dropped;
};

// Dropout of contiguous rows.
struct Drop {
    const float *x;
    float *y;
    int64_t rows, width;
    Chance chance;
    int64_t threads;
};

struct Norm {
    const float *weight, *bias;
    double epsilon;
};

// A linear map with weight out x in, as torch stores it; the bias may be null.
struct Linear {
    const float *weight, *bias;
};

// y = x weight^T + bias for a few contiguous rows, as when tokens are decoded one by one.
struct Project {
    const float *x;
    float *y;
    Linear linear;
    int64_t rows, in, out, threads;
};

// x + dropout(contract(activation(expand(norm(x))))) for contiguous rows. Sizes are multiples of ALIGNED.
struct Feed {
    int64_t rows, width, hidden, activation, threads;
    const float *x;
    float *y;
    Norm norm;
    Linear expand, contract;
    Chance chance;
    // Backward. d_weights: of expand, its bias, of contract, its bias, of the norm's weight and bias, one after the other; added to.
    const float *d_y;
    float *d_x, *d_weights;
};

// queries + dropout(output(attention(norm(queries), norm(x)))) for contiguous rows b l width and b n width, which may be the same tensor.
// Sizes of all heads together are multiples of ALIGNED.
struct Attend {
    Call call;  // TOTAL attention, without q, k, v and out
    int64_t width;
    const float *x, *queries;
    float *y, *mixed;  // b n width; mixed is the input of `output`, saved for the backward pass, or null
    Norm norm;
    Linear query, key, value, output;
    Chance chance;
    // Backward. d_reading: of query, its bias, of output, its bias, of the norm's weight and bias; d_keys: of key, its bias, of value, its
    // bias, of the norm's weight and bias; one after the other; added to.
    const float *d_y;
    float *d_x, *d_queries, *d_reading, *d_keys;
};
constexpr int64_t ALIGNED = 16;

// Packed weights of a block: of a feed-forward network (two), or of attention, where those of queries and keys are packed per head.
struct Packs {
    float *first, *second, *third, *fourth;
};

// Floats of a packed linear map: its bias, and its weight in panels of at most 64 columns.
inline int64_t packed_size(int64_t out, int64_t in) { return (in + 1) * ((out + 63) / 64 * 64); }

// The functions of one instruction set. Each does the work of one head of one row, or of some of its tokens.
struct Kernels {
    // TOTAL: keys begin … end are summed into kv and z; queries begin … end read call.kv and call.z.
    void (*absorb)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end, float *kv, float *z);
    void (*read)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end);
    void (*read_back)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end, float *d_kv, float *d_z);
    void (*absorb_back)(const Call &, int64_t b, int64_t h, int64_t begin, int64_t end);
    // CAUSAL and TWO_SIDED: all tokens; step is one causal token.
    void (*scan)(const Call &, int64_t b, int64_t h);
    void (*scan_back)(const Call &, int64_t b, int64_t h);
    void (*step)(const Call &, int64_t b, int64_t h);
    void (*drop)(const Drop &, int64_t begin, int64_t end);
    void (*project)(const Project &, int64_t begin, int64_t end);  // outputs begin … end
    void (*pack)(const Linear &, int64_t out, int64_t in, float *to);
    // Rows begin … end; sums collect the gradients of weights.
    void (*feed)(const Feed &, const Packs &, int64_t begin, int64_t end);
    void (*feed_back)(const Feed &, const Packs &, int64_t begin, int64_t end, float *sums);
    // Tokens begin … end of one row, all heads.
    void (*attend_absorb)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *kv, float *z);
    void (*attend_read)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end);
    void (*attend_read_back)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *d_kv, float *d_z, float *sums);
    void (*attend_absorb_back)(const Attend &, const Packs &, int64_t b, int64_t begin, int64_t end, float *sums);
};

// The kernels of each instruction set that was compiled, by feature map.
namespace baseline {
const Kernels *kernels(int64_t feature_map);
}
namespace avx2 {
const Kernels *kernels(int64_t feature_map);
}
namespace avx512 {
const Kernels *kernels(int64_t feature_map);
}

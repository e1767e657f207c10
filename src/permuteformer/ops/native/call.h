// One call of the kernel: tensors as they lie in memory, and what is to be done with them. The same for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

// Numbers b h l and then side by side; strides are in numbers. Null data: there is no such tensor.
struct Tensor4 {
    float *data;
    int64_t batch, head, token;

    float *row(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

// Whole numbers b l and then a, side by side; null data: there are none.
struct Positions {
    const int64_t *data;
    int64_t batch, token;
};

// Features begin … begin + size - 1 of a head, moved by the positions' number of this axis, and as they were after a period: one cycle; or several
// short ones, whose rows of the table begin at `lanes`, which is -1 for the one.
struct Piece {
    int32_t begin, size, axis, period, lanes;
};

constexpr int32_t LANES = 8;  // of a row of that table: for each feature of a piece, the one that it becomes

// Every field has 8 bytes: Python writes them as one array, in the order of FIELDS in native/__init__.py.
struct Call {
    int64_t batch, heads, length, queries, features, values, map, normalize, threads;
    Tensor4 q, k, v, out;
    float *kv, *z;           // b h m d and b h m: the carry, before and then after
    const Piece *pieces;     // of all heads
    const int32_t *of_head;  // h + 1: where a head's pieces begin; or null without a permutation
    const int32_t *lanes;    // rows of LANES
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

// Dropout of numbers that lie side by side. 8 bytes a field too.
struct Drop {
    const float *x;
    float *y;
    int64_t count, seed, dropped, threads;  // dropped: of 2^32
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
    // Numbers begin … end: always the same ones, as they share a key.
    void (*drop)(const Drop &, int64_t begin, int64_t end);
};

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

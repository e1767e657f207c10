// Dropout: which numbers are dropped is found from a seed and their places alone, so that nothing is kept for the backward pass.
#pragma once

#include "call.h"

namespace ISA {

// 32 bits of which each depends on all of x.
static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// A key for some places: the n-th number of SplitMix64.
static inline uint64_t key_of(uint64_t seed, uint64_t n) {
    uint64_t x = seed + (n + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Places begin … end, which have one key.
inline void drop(const Drop &call, int64_t begin, int64_t end) {
    const uint64_t key = key_of(static_cast<uint64_t>(call.seed), static_cast<uint64_t>(begin));
    const uint32_t first = static_cast<uint32_t>(key), second = static_cast<uint32_t>(key >> 32);
    const uint32_t dropped = static_cast<uint32_t>(call.dropped);
    const float scale = static_cast<float>(4294967296.0 / (4294967296.0 - dropped));
    const float *x = call.x + begin;
    float *y = call.y + begin;
    const uint32_t count = static_cast<uint32_t>(end - begin);
    for (uint32_t i = 0; i < count; i++) y[i] = mixed(mixed(first + i) ^ second) >= dropped ? x[i] * scale : 0.f;
}

}  // namespace ISA

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

// The noise of the n-th row.
struct Noise {
    uint32_t first, second, dropped;
    float scale;

    Noise(const Chance &chance, int64_t n) : dropped(static_cast<uint32_t>(chance.dropped)) {
        uint64_t x = static_cast<uint64_t>(chance.seed) + (static_cast<uint64_t>(n) + 1) * 0x9e3779b97f4a7c15u;  // SplitMix64
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x = x ^ (x >> 31);
        first = static_cast<uint32_t>(x), second = static_cast<uint32_t>(x >> 32);
        scale = static_cast<float>(4294967296.0 / (4294967296.0 - dropped));
    }
    // Number x at place i of the row.
    float of(float x, uint32_t i) const { return mixed(mixed(first + i) ^ second) >= dropped ? x * scale : 0.f; }
};

// A row of numbers, some of them dropped, on what others are; null for nothing. y may be any of them.
static inline void drop_row(const Chance &chance, int64_t n, const float *x, const float *others, float *y, uint32_t count) {
    const Noise noise(chance, n);
    if (others && chance.dropped) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = others[i] + noise.of(x[i], i);
    } else if (others) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = others[i] + x[i];
    } else {
#pragma GCC ivdep
        for (uint32_t i = 0; i < count; i++) y[i] = noise.of(x[i], i);
    }
}

static void drop(const Drop &call, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
        drop_row(call.chance, n, call.x + n * call.width, nullptr, call.y + n * call.width, static_cast<uint32_t>(call.width));
}

}  // namespace ISA

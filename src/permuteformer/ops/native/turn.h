// Rotates features along the cycles of a permutation by the positions of their tokens, or back. For a run of tokens with equal steps between
// positions, each piece of the features is rotated for all tokens before the next piece.
//
// Reads and writes whole vectors: a row must have room for one vector after its last feature. Each piece overwrites what the one before it
// wrote beyond its end.
#pragma once

#include <vector>

#include "call.h"
#include "rows.h"

namespace ISA {

// Short neighbouring cycles are rotated together, by shuffles of SHUFFLED numbers in vectors of LANES.
#if defined(__AVX512F__)
constexpr int SHUFFLED = 32, LANES = 16;
#elif defined(__AVX2__)
constexpr int SHUFFLED = 8, LANES = 8;
#else
constexpr int SHUFFLED = 8, LANES = W;
#endif
typedef int32_t lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t loose_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Consecutive tokens: their number, and for each axis the position of the first one and the step to the next, 0 or 1.
struct Run {
    int64_t tokens;
    const int64_t *first, *step;
};

// A long cycle, turned by shift at the first token: two runs of neighbours. They begin with a vector that may lie across two lines of the cache; the
// others are written where vectors begin.
template <int MAP, bool BACK>
static void turn_long(ptrdiff_t n, ptrdiff_t shift, int64_t step, int64_t tokens, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
    const ptrdiff_t first = -(reinterpret_cast<uintptr_t>(y) / sizeof(float)) & (W - 1);  // of all rows: they are whole vectors long
    for (int64_t t = 0; t < tokens; t++, x += x_row, y += y_row) {
        const ptrdiff_t by = BACK ? n - shift : shift, again = n - by;  // where it begins again
        ptrdiff_t i = first;
        if (first) store(y, Phi<MAP>::of(load(x + by)));
        for (; i < again; i += W) store(y + i, Phi<MAP>::of(load(x + by + i)));
        store(y + again, Phi<MAP>::of(load(x)));
        for (; i < n; i += W) store(y + i, Phi<MAP>::of(load(x - again + i)));
        shift += step;
        shift = shift == n ? 0 : shift;
    }
}

// Several short cycles: of each number its place, and the ends of the cycle that it is in; and for one direction where the number comes from that
// takes its place.
struct Short {
    lanes here[SHUFFLED / LANES], begin[SHUFFLED / LANES], end[SHUFFLED / LANES];
};
struct From {
    lanes from[SHUFFLED / LANES];
};

// V vectors of a row, of which each number may come from any.
template <int V>
static inline void shuffle(const float *x, const lanes (&from)[V], vec (&y)[V]) {
#if defined(__AVX512F__)
    const vec first = load(x);
    if (V == 1) {
        y[0] = (vec)_mm512_permutexvar_ps((__m512i)from[0], (__m512)first);
    } else {
        const vec second = load(x + W);
        for (int i = 0; i < V; i++) y[i] = (vec)_mm512_permutex2var_ps((__m512)first, (__m512i)from[i], (__m512)second);
    }
#elif defined(__AVX2__)
    for (int i = 0; i < V; i++) y[i] = (vec)_mm256_permutevar8x32_ps((__m256)load(x), (__m256i)from[i]);
#else
    for (int i = 0; i < V; i++)
        for (int j = 0; j < W; j++) y[i][j] = x[from[i][j]];
#endif
}

// A step on.
template <bool BACK>
static inline lanes next_from(lanes from, lanes begin, lanes end) {
    return BACK ? ((from == begin) ? end - 1 : from - 1) : ((from + 1 == end) ? begin : from + 1);
}

template <int MAP, bool BACK, int V>
static void turn_short(const Short &s, From &state, int64_t step, int64_t tokens, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
    lanes from[V];
    for (int i = 0; i < V; i++) from[i] = state.from[i];
    for (int64_t t = 0; t < tokens; t++, x += x_row, y += y_row) {
        vec turned[V] = {};
        shuffle<V>(x, from, turned);
        for (int i = 0; i < V; i++) store(y + i * W, Phi<MAP>::of(turned[i]));
        if (step)
            for (int i = 0; i < V; i++) from[i] = next_from<BACK>(from[i], s.begin[i], s.end[i]);
    }
    for (int i = 0; i < V; i++) state.from[i] = from[i];
}

// The cycles of a head, in pieces, and how far each is turned.
class Turner {
    // One direction: the position at which the next run continues, and the rotation there.
    struct State {
        int64_t position = 0;
        ptrdiff_t shift = 0;
        bool is_known = false;
    };
    struct Piece {
        int32_t first, last, begin, size, axis;  // cycles first … last
        State state[2];
        Short *cycles = nullptr;  // and from where they come; null for one long cycle
        From *from = nullptr;
    };
    const Cycle *cycles;
    int32_t count;
    std::vector<Piece> pieces;

  public:
    int32_t axes = 1;

    Turner(const Call &call, int64_t h, Arena &arena)
        : cycles(call.of_head ? call.cycles + call.of_head[h] : nullptr), count(call.of_head ? call.of_head[h + 1] - call.of_head[h] : 0) {
        for (int32_t n = 0; n < count; n++) {
            const Cycle &cycle = cycles[n];
            axes = cycle.axis < axes ? axes : cycle.axis + 1;
            const bool joins = !pieces.empty() && pieces.back().axis == cycle.axis && pieces.back().size + cycle.length <= SHUFFLED;
            if (!joins) pieces.push_back({n, n, cycle.begin, 0, cycle.axis, {}});
            pieces.back().last = n + 1;
            pieces.back().size += cycle.length;
        }
        for (Piece &piece : pieces) {
            if (piece.size > SHUFFLED) continue;
            piece.cycles = arena.take<Short>(1), piece.from = arena.take<From>(2);
            for (int i = 0; i < SHUFFLED; i++) {
                for (lanes *x : {piece.cycles->here, piece.cycles->begin, piece.from[0].from, piece.from[1].from}) set(x, i, i);
                set(piece.cycles->end, i, i + 1);
            }
            for (int32_t n = piece.first; n < piece.last; n++) {
                const int32_t begin = cycles[n].begin - piece.begin, end = begin + cycles[n].length;
                for (int32_t i = begin; i < end; i++) set(piece.cycles->begin, i, begin), set(piece.cycles->end, i, end);
            }
        }
    }
    bool turns_nothing() const { return !count; }

    // The rows x of a run, mapped, each piece turned as far as the tokens' positions say, or back, to the rows y.
    template <int MAP, bool BACK>
    void rows(const Run &run, const float *x, ptrdiff_t x_row, float *y, ptrdiff_t y_row) {
        for (Piece &piece : pieces) {
            const int64_t first = run.first[piece.axis], step = run.step[piece.axis];
            const float *from = x + piece.begin;
            float *to = y + piece.begin;
            State &state = piece.state[BACK];
            if (!state.is_known || state.position != first) go_to<BACK>(piece, first);
            if (!piece.cycles) {
                turn_long<MAP, BACK>(piece.size, state.shift, step, run.tokens, from, x_row, to, y_row);
                for (state.shift += step * run.tokens; state.shift >= piece.size;) state.shift -= piece.size;
            } else if (SHUFFLED > LANES && piece.size > LANES) {
                turn_short<MAP, BACK, SHUFFLED / LANES>(*piece.cycles, piece.from[BACK], step, run.tokens, from, x_row, to, y_row);
            } else {
                turn_short<MAP, BACK, 1>(*piece.cycles, piece.from[BACK], step, run.tokens, from, x_row, to, y_row);
            }
            state = {first + step * run.tokens, state.shift, true};
        }
    }

  private:
    static void set(lanes *x, int32_t i, int32_t to) { x[i / LANES][i % LANES] = to; }

    template <bool BACK>
    void go_to(Piece &piece, int64_t position) {
        State &state = piece.state[BACK];
        if (piece.cycles && state.is_known && position - state.position == 1) {
            for (int i = 0; i < SHUFFLED / LANES; i++)
                piece.from[BACK].from[i] = next_from<BACK>(piece.from[BACK].from[i], piece.cycles->begin[i], piece.cycles->end[i]);
            return;
        }
        for (int32_t n = piece.first; n < piece.last; n++) {
            const int64_t length = cycles[n].length;
            int64_t shift = position;
            if (static_cast<uint64_t>(position) >= static_cast<uint64_t>(length)) shift = position % length + (position % length < 0 ? length : 0);
            state.shift = shift;
            if (!piece.cycles) return;
            const int32_t begin = cycles[n].begin - piece.begin, by = static_cast<int32_t>(BACK && shift ? length - shift : shift);
            for (int i = 0; i < SHUFFLED / LANES; i++) {
                lanes &from = piece.from[BACK].from[i];
                const lanes ahead = piece.cycles->here[i] + by;
                const lanes turned = (ahead >= piece.cycles->end[i]) ? ahead - static_cast<int32_t>(length) : ahead;
                from = (piece.cycles->begin[i] == begin) ? turned : from;
            }
        }
    }
};

}  // namespace ISA

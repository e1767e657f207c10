// The kernel for one instruction set: compiled once for each, with ISA its name and flags for what the compiler may use.
#include "block.h"
#include "scan.h"

namespace ISA {

template <int MAP>
static const Kernels *table() {
    static const Kernels kernels{
        absorb<MAP>, read<MAP>, read_back<MAP>, absorb_back<MAP>, scan<MAP>, scan_back<MAP>, step<MAP>, drop, project, pack, feed, feed_back,
        attend_absorb<MAP>, attend_read<MAP>, attend_read_back<MAP>, attend_absorb_back<MAP>,
    };
    return &kernels;
}

const Kernels *kernels(int64_t feature_map) {
    switch (feature_map) {
    case RELU_EPS: return table<RELU_EPS>();
    case RELU: return table<RELU>();
    default: return table<SQUARED_RELU>();
    }
}

}  // namespace ISA

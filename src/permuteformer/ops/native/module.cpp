// What Python calls: checks nothing that native_backend.py has checked, chooses the instruction set, and shares out the work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"

namespace nb = nanobind;
using namespace nb::literals;

using Floats4 = nb::ndarray<float, nb::ndim<4>, nb::device::cpu>;
using Floats3 = nb::ndarray<float, nb::ndim<3>, nb::device::cpu, nb::c_contig>;
using Carry = nb::ndarray<float, nb::ndim<4>, nb::device::cpu, nb::c_contig>;
using Floats1 = nb::ndarray<float, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Doubles2 = nb::ndarray<double, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
using Ints1 = nb::ndarray<int64_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Ints3 = nb::ndarray<int64_t, nb::ndim<3>, nb::device::cpu>;
using Cycles = nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
using Offsets = nb::ndarray<int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using Mask = nb::ndarray<bool, nb::ndim<2>, nb::device::cpu>;

namespace {

constexpr int64_t PART = 2048;  // tokens of a bidirectional task; of any number of threads, so that sums are always the same

struct Set {
    const char *name;
    const Kernels *(*kernels)(int);
};

std::vector<Set> find() {
    std::vector<Set> sets;
#if defined(PERMUTEFORMER_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        sets.push_back({"avx512", avx512::kernels});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back({"avx2", avx2::kernels});
#endif
    sets.push_back({"baseline", baseline::kernels});
    return sets;
}

const std::vector<Set> &sets() {
    static const std::vector<Set> found = find();
    return found;
}

std::atomic<size_t> chosen{0};

Tensor4 tensor(const Floats4 &x) { return {x.data(), x.stride(0), x.stride(1), x.stride(2)}; }

// All tasks, on as many threads. The first exception of any is thrown when they have ended.
template <typename Task>
void share_out(int64_t tasks, int threads, Task task) {
    std::exception_ptr failed;
    std::atomic<bool> stop{false};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t n = 0; n < tasks; n++) {
        if (stop) continue;
        try {
            task(n);
        } catch (...) {
            if (!stop.exchange(true)) failed = std::current_exception();
        }
    }
    if (failed) std::rethrow_exception(failed);
}

struct Work {
    Call call{};
    const Kernels *kernels;
    int threads;

    Work(const Floats4 &q, const Floats4 &k, const Floats4 &v, const Floats4 &out, const Carry &kv, const Floats3 &z, const Cycles &cycles,
         const Offsets &of_head, const std::optional<Ints3> &positions, const Ints1 &start, const std::optional<Mask> &shown,
         const std::optional<Floats1> &log_decay, int map, bool normalize, int threads)
        : kernels(sets()[chosen].kernels(map)), threads(threads) {
        call.batch = q.shape(0), call.heads = q.shape(1), call.length = q.shape(2), call.features = q.shape(3), call.values = v.shape(3);
        call.q = tensor(q), call.k = tensor(k), call.v = tensor(v), call.out = tensor(out);
        call.cycles = reinterpret_cast<const Cycle *>(cycles.data()), call.of_head = of_head.data();
        if (positions) {
            call.positions = positions->data();
            call.positions_batch = positions->shape(0) == 1 ? 0 : positions->stride(0), call.positions_token = positions->stride(1);
        }
        call.start = start.data();
        if (shown) call.shown = reinterpret_cast<const uint8_t *>(shown->data()), call.shown_batch = shown->stride(0);
        if (log_decay) call.log_decay = log_decay->data();
        call.map = map, call.normalize = normalize;
        call.kv = kv.data(), call.z = z.data();
    }
    void back(const Floats4 &d_out, const Floats4 &d_q, const Floats4 &d_k, const Floats4 &d_v, const Carry &d_kv, const Floats3 &d_z) {
        call.d_out = tensor(d_out), call.d_q = tensor(d_q), call.d_k = tensor(d_k), call.d_v = tensor(d_v);
        call.d_kv = d_kv.data(), call.d_z = d_z.data();
    }

    int64_t heads() const { return call.batch * call.heads; }
    int64_t parts() const { return (call.length + PART - 1) / PART; }
    int64_t size() const { return call.features * (call.values + 1); }

    template <typename Task>
    void each_head(Task task) const {
        share_out(heads(), threads, [&](int64_t n) { task(n / call.heads, n % call.heads); });
    }
    template <typename Task>
    void each_part(Task task) const {
        const int64_t of_head = parts();
        share_out(heads() * of_head, threads, [&](int64_t n) {
            const int64_t head = n / of_head, begin = n % of_head * PART;
            task(n, head / call.heads, head % call.heads, begin, begin + PART < call.length ? begin + PART : call.length);
        });
    }
    // What the parts of each head have summed up, onto kv and z.
    void gather(const std::vector<float> &sums, float *kv, float *z) const {
        const int64_t products = call.features * call.values, features = call.features;
        share_out(heads(), threads, [&](int64_t head) {
            for (int64_t part = 0; part < parts(); part++) {
                const float *from = sums.data() + (head * parts() + part) * size();
                for (int64_t i = 0; i < products; i++) kv[head * products + i] += from[i];
                for (int64_t i = 0; i < features; i++) z[head * features + i] += from[products + i];
            }
        });
    }
};

void total(const Floats4 &q, const Floats4 &k, const Floats4 &v, const Floats4 &out, const Carry &kv, const Floats3 &z, const Cycles &cycles,
           const Offsets &of_head, const std::optional<Ints3> &positions, const Ints1 &start, const std::optional<Mask> &shown, int map,
           bool normalize, int threads) {
    nb::gil_scoped_release release;
    Work work(q, k, v, out, kv, z, cycles, of_head, positions, start, shown, std::nullopt, map, normalize, threads);
    const int64_t products = work.call.features * work.call.values;
    std::vector<float> sums(work.heads() * work.parts() * work.size());
    work.each_part([&](int64_t n, int64_t b, int64_t h, int64_t begin, int64_t end) {
        float *to = sums.data() + n * work.size();
        work.kernels->absorb(work.call, b, h, begin, end, to, to + products);
    });
    work.gather(sums, work.call.kv, work.call.z);
    work.each_part([&](int64_t, int64_t b, int64_t h, int64_t begin, int64_t end) { work.kernels->read(work.call, b, h, begin, end); });
}

void total_back(const Floats4 &q, const Floats4 &k, const Floats4 &v, const Floats4 &out, const Carry &kv, const Floats3 &z,
                const Cycles &cycles, const Offsets &of_head, const std::optional<Ints3> &positions, const Ints1 &start,
                const std::optional<Mask> &shown, int map, bool normalize, int threads, const Floats4 &d_out, const Floats4 &d_q,
                const Floats4 &d_k, const Floats4 &d_v, const Carry &d_kv, const Floats3 &d_z) {
    nb::gil_scoped_release release;
    Work work(q, k, v, out, kv, z, cycles, of_head, positions, start, shown, std::nullopt, map, normalize, threads);
    work.back(d_out, d_q, d_k, d_v, d_kv, d_z);
    const int64_t products = work.call.features * work.call.values;
    std::vector<float> sums(work.heads() * work.parts() * work.size());
    work.each_part([&](int64_t n, int64_t b, int64_t h, int64_t begin, int64_t end) {
        float *to = sums.data() + n * work.size();
        work.kernels->read_back(work.call, b, h, begin, end, to, to + products);
    });
    work.gather(sums, work.call.d_kv, work.call.d_z);
    work.each_part([&](int64_t, int64_t b, int64_t h, int64_t begin, int64_t end) { work.kernels->absorb_back(work.call, b, h, begin, end); });
}

void scan(const Floats4 &q, const Floats4 &k, const Floats4 &v, const Floats4 &out, const Carry &kv, const Floats3 &z, const Cycles &cycles,
          const Offsets &of_head, const std::optional<Ints3> &positions, const Ints1 &start, const std::optional<Mask> &shown,
          const std::optional<Floats1> &log_decay, int map, bool normalize, int threads, const std::optional<Floats4> &kept) {
    nb::gil_scoped_release release;
    Work work(q, k, v, out, kv, z, cycles, of_head, positions, start, shown, log_decay, map, normalize, threads);
    if (kept) work.call.kept = kept->data();
    work.each_head([&](int64_t b, int64_t h) { work.kernels->scan(work.call, b, h, kept.has_value()); });
}

void scan_back(const Floats4 &q, const Floats4 &k, const Floats4 &v, const Floats4 &out, const Carry &kv, const Floats3 &z,
               const Cycles &cycles, const Offsets &of_head, const std::optional<Ints3> &positions, const Ints1 &start,
               const std::optional<Mask> &shown, const std::optional<Floats1> &log_decay, int map, bool normalize, int threads,
               const Floats4 &kept, const Floats4 &d_out, const Floats4 &d_q, const Floats4 &d_k, const Floats4 &d_v, const Carry &d_kv,
               const Floats3 &d_z, const std::optional<Doubles2> &d_log_decay) {
    nb::gil_scoped_release release;
    Work work(q, k, v, out, kv, z, cycles, of_head, positions, start, shown, log_decay, map, normalize, threads);
    work.back(d_out, d_q, d_k, d_v, d_kv, d_z);
    work.call.kept = kept.data();
    if (d_log_decay) work.call.d_log_decay = d_log_decay->data();
    work.each_head([&](int64_t b, int64_t h) { work.kernels->scan_back(work.call, b, h); });
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Set &set : sets()) names.push_back(set.name);
    return names;
}

void use(const std::string &name) {
    for (size_t n = 0; n < sets().size(); n++)
        if (name == sets()[n].name) {
            chosen = n;
            return;
        }
    throw std::invalid_argument("this processor has no instruction set " + name);
}

}  // namespace

NB_MODULE(_kernel, module) {
    module.attr("BLOCK") = BLOCK;
    module.attr("GROUP") = GROUP;
    module.def("instruction_sets", &instruction_sets);
    module.def("use", &use);
    module.def("in_use", [] { return std::string(sets()[chosen].name); });
    module.def("total", &total);
    module.def("total_back", &total_back);
    module.def("scan", &scan);
    module.def("scan_back", &scan_back);
}

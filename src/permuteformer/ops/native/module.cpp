// What Python calls, by ctypes: chooses the instruction set and shares out the work. Python has checked everything.
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "call.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t PART = 2048;  // tokens of a bidirectional task: of any number of threads, so that sums are always the same

struct Set {
    const char *name;
    const Kernels *(*kernels)(int64_t);
};

std::vector<Set> find() {
    std::vector<Set> sets;
#if defined(__x86_64__)
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

// All tasks, on as many threads as the call says; operations are of all of them together. The first exception of any is thrown when they
// have ended. Without OpenMP (on macOS Apple's compiler has none, and a second one beside torch's would end the process) threads are made for
// each call, if it is worth that.
template <typename Task>
void share_out(int64_t tasks, int64_t threads, [[maybe_unused]] int64_t operations, Task task) {
    std::exception_ptr failed;
    std::atomic<bool> stop{false};
    const auto attempt = [&](int64_t n) {
        if (stop) return;
        try {
            task(n);
        } catch (...) {
            if (!stop.exchange(true)) failed = std::current_exception();
        }
    };
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tasks > 1 && threads > 1)
    for (int64_t n = 0; n < tasks; n++) attempt(n);
#else
    constexpr int64_t WORTH_A_THREAD = 1 << 20;  // operations; starting one takes about as long as a tenth of them
    if (operations < WORTH_A_THREAD) threads = 1;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t n = next++; n < tasks; n = next++) attempt(n);
    };
    std::vector<std::thread> others;
    try {
        while (static_cast<int64_t>(others.size()) + 1 < (threads < tasks ? threads : tasks)) others.emplace_back(work);
    } catch (const std::exception &) {  // no more threads, or no memory for them: those that are there do the work
    }
    work();
    for (std::thread &other : others) other.join();
#endif
    if (failed) std::rethrow_exception(failed);
}

struct Work {
    const Call &call;
    const Kernels &kernels;
    int64_t heads, products, size, operations;

    explicit Work(const Call &call)
        : call(call), kernels(*sets()[chosen].kernels(call.map)), heads(call.batch * call.heads), products(call.features * call.values), size(products + call.features), operations(heads * call.length * products) {}

    template <typename Task>
    void each_head(Task task) const {
        share_out(heads, call.threads, operations, [&](int64_t n) { task(call, n / call.heads, n % call.heads); });
    }
    static int64_t parts(int64_t tokens) { return (tokens + PART - 1) / PART; }

    template <typename Task>
    void each_part(int64_t tokens, Task task) const {
        const int64_t count = parts(tokens);
        share_out(heads * count, call.threads, operations, [&](int64_t n) {
            const int64_t head = n / count, begin = n % count * PART, end = begin + PART < tokens ? begin + PART : tokens;
            task(n, head / call.heads, head % call.heads, begin, end);
        });
    }
    // Adds what the parts of each head come to onto kv and z.
    template <typename Task>
    void sum_parts(int64_t tokens, float *kv, float *z, Task task) const {
        const int64_t count = parts(tokens);
        std::vector<float> sums(heads * count * size);
        each_part(tokens, [&](int64_t n, int64_t b, int64_t h, int64_t begin, int64_t end) {
            task(call, b, h, begin, end, sums.data() + n * size, sums.data() + n * size + products);
        });
        for (int64_t n = 0; n < heads * count; n++) {
            const float *from = sums.data() + n * size;
            float *to_kv = kv + n / count * products, *to_z = z + n / count * call.features;
            for (int64_t i = 0; i < products; i++) to_kv[i] += from[i];
            for (int64_t i = 0; i < call.features; i++) to_z[i] += from[products + i];
        }
    }
    template <typename Task>
    void do_parts(int64_t tokens, Task task) const {
        each_part(tokens, [&](int64_t, int64_t b, int64_t h, int64_t begin, int64_t end) { task(call, b, h, begin, end); });
    }
};

// Whether there was memory for it.
template <typename Task>
int succeeds(Task task) {
    try {
        task();
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

}  // namespace

EXPORTED int64_t call_size() { return sizeof(Call); }
EXPORTED int64_t block() { return BLOCK; }
EXPORTED int64_t group() { return GROUP; }

// The name of an instruction set that this processor has, the best one first; null after the last.
EXPORTED const char *instruction_set(int64_t n) { return n < static_cast<int64_t>(sets().size()) ? sets()[n].name : nullptr; }
EXPORTED const char *in_use() { return sets()[chosen].name; }
EXPORTED int use(const char *name) {
    for (size_t n = 0; n < sets().size(); n++)
        if (!std::strcmp(name, sets()[n].name)) {
            chosen = n;
            return 1;
        }
    return 0;
}

EXPORTED int total(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        work.sum_parts(call->length, call->kv, call->z, work.kernels.absorb);
        work.do_parts(call->queries, work.kernels.read);
    });
}

EXPORTED int total_back(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        work.sum_parts(call->queries, call->d_kv, call->d_z, work.kernels.read_back);
        work.do_parts(call->length, work.kernels.absorb_back);
    });
}

EXPORTED int scan(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        work.each_head(call->length == 1 && !call->kept ? work.kernels.step : work.kernels.scan);
    });
}

EXPORTED int scan_back(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        work.each_head(work.kernels.scan_back);
    });
}

EXPORTED int dropout(const Drop *call) {
    constexpr int64_t SHARE = 1 << 14;
    const auto drop = sets()[chosen].kernels(0)->drop;
    share_out((call->count + SHARE - 1) / SHARE, call->threads, call->count, [=](int64_t n) {
        const int64_t begin = n * SHARE;
        drop(*call, begin, begin + SHARE < call->count ? begin + SHARE : call->count);
    });
    return 1;
}

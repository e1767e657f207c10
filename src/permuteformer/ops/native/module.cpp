// The functions that Python calls by ctypes: they choose the instruction set and distribute the work. Python has checked all arguments.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#define ISA module  // the headers are compiled once more, for this file
#include "arena.h"
#include "call.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using module::Arena;

namespace {

constexpr int64_t PART = 2048;  // tokens of a task, whatever the number of threads, so that sums are always the same
constexpr int64_t PART_OF_BLOCK = 128;  // tokens of a task of a fused block, about
constexpr int64_t PART_OF_DROPOUT = 1 << 14;

struct InstructionSet {
    const char *name;
    const Kernels *(*kernels)(int64_t);
};

std::vector<InstructionSet> detect() {
    std::vector<InstructionSet> sets;
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

const std::vector<InstructionSet> &sets() {
    static const std::vector<InstructionSet> found = detect();
    return found;
}

std::atomic<size_t> chosen{0};

// Runs all tasks on the threads of the call, or on one if there are too few operations to be worth it. The first exception is thrown when
// they have ended. Without OpenMP (Apple's compiler has none, and a second OpenMP beside torch's would end the process) threads are started
// for each call.
template <typename Task>
void distribute(int64_t tasks, int64_t threads, int64_t operations, Task task) {
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
    constexpr int64_t WORTH_A_THREAD = 1 << 18;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tasks > 1 && threads > 1 && operations >= WORTH_A_THREAD)
    for (int64_t n = 0; n < tasks; n++) attempt(n);
#else
    constexpr int64_t WORTH_A_THREAD = 1 << 20;
    if (operations < WORTH_A_THREAD) threads = 1;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t n = next++; n < tasks; n = next++) attempt(n);
    };
    std::vector<std::thread> others;
    try {
        while (static_cast<int64_t>(others.size()) + 1 < (threads < tasks ? threads : tasks)) others.emplace_back(work);
    } catch (const std::exception &) {  // no more threads: those that started do the work
    }
    work();
    for (std::thread &other : others) other.join();
#endif
    if (failed) std::rethrow_exception(failed);
}

// Attention by itself.
struct Work {
    const Call &call;
    const Kernels &kernels;
    int64_t heads, products, size, operations;

    explicit Work(const Call &call)
        : call(call), kernels(*sets()[chosen].kernels(call.feature_map)), heads(call.batch * call.heads), products(call.features * call.values), size(products + call.features), operations(heads * call.length * products) {}

    template <typename Task>
    void each_head(Task task) const {
        distribute(heads, call.threads, operations, [&](int64_t n) { task(call, n / call.heads, n % call.heads); });
    }
    static int64_t parts(int64_t tokens) { return (tokens + PART - 1) / PART; }

    template <typename Task>
    void each_part(int64_t tokens, Task task) const {
        const int64_t count = parts(tokens);
        distribute(heads * count, call.threads, operations, [&](int64_t n) {
            const int64_t head = n / count, begin = n % count * PART, end = begin + PART < tokens ? begin + PART : tokens;
            task(n, head / call.heads, head % call.heads, begin, end);
        });
    }
    // kv and z = their first values (zero where null), and the sums of the parts of each head.
    template <typename Task>
    void sum_parts(int64_t tokens, const float *first_kv, const float *first_z, float *kv, float *z, Task task) const {
        const int64_t count = parts(tokens);
        std::vector<float> sums(heads * count * size);
        each_part(tokens, [&](int64_t n, int64_t b, int64_t h, int64_t begin, int64_t end) {
            task(call, b, h, begin, end, sums.data() + n * size, sums.data() + n * size + products);
        });
        set(kv, first_kv, heads * products);
        set(z, first_z, heads * call.features);
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
    static void set(float *to, const float *from, int64_t count) {
        from ? std::copy_n(from, count, to) : std::fill_n(to, count, 0.0f);
    }
};

// Tokens 0 … length in even parts, an even number of them, not much longer than `about`.
struct Parts {
    int64_t length, count;

    Parts(int64_t length, int64_t about) : length(length), count(length <= about ? 1 : (length + 2 * about - 1) / (2 * about) * 2) {}
    int64_t begin(int64_t n) const { return length * n / count; }
};

// Rows of the batch in groups that sum gradients of weights by themselves: several rows, or a part of one. Their number depends on sizes
// alone, not on threads.
struct Groups {
    int64_t rows, together;
    Parts parts;

    Groups(int64_t rows, int64_t length) : rows(rows), together(1), parts(length, length) {
        const int64_t wanted = std::min<int64_t>(std::max<int64_t>(rows * length / 1024, 2), 32);
        if (rows >= wanted) {
            together = (rows + wanted - 1) / wanted;
        } else {
            parts = Parts(length, (length * rows + wanted - 1) / wanted);
        }
    }
    int64_t count() const { return (rows + together - 1) / together * parts.count; }
    // Calls each(row, begin, end) for all of group n.
    template <typename Each>
    void of(int64_t n, Each each) const {
        const int64_t first = n / parts.count * together, last = std::min(first + together, rows), part = n % parts.count;
        for (int64_t row = first; row < last; row++) each(row, part, parts.begin(part), parts.begin(part + 1));
    }
};

// Every group sums its own gradients of weights, `size` of them, by task(n, sums); then they are added to d in order.
template <typename Task>
void add_gradients(Arena &arena, int64_t groups, int64_t size, int64_t threads, int64_t operations, float *d, Task task) {
    float *sums = arena.take<float>(groups * size);
    distribute(groups, threads, operations, [&](int64_t n) {
        std::fill_n(sums + n * size, size, 0.0f);
        task(n, sums + n * size);
    });
    constexpr int64_t SHARE = 1 << 14;
    distribute((size + SHARE - 1) / SHARE, threads, groups * size, [&](int64_t share) {
        const int64_t end = std::min((share + 1) * SHARE, size);
        for (int64_t n = 0; n < groups; n++)
            for (int64_t i = share * SHARE; i < end; i++) d[i] += sums[n * size + i];
    });
}

// x + dropout(contract(activation(expand(norm(x)))))
struct FeedWork {
    const Feed &feed;
    const Kernels &kernels;
    int64_t weights;
    Arena &arena;
    Packs packs{};

    FeedWork(const Feed &feed, Arena &arena)
        : feed(feed), kernels(*sets()[chosen].kernels(0)), weights(2 * feed.width * feed.hidden), arena(arena) {
        packs.first = arena.take<float>(packed_size(feed.hidden, feed.width));
        packs.second = arena.take<float>(packed_size(feed.width, feed.hidden));
        distribute(2, feed.threads, weights, [&](int64_t n) {
            if (n) {
                kernels.pack(feed.contract, feed.width, feed.hidden, packs.second);
            } else {
                kernels.pack(feed.expand, feed.hidden, feed.width, packs.first);
            }
        });
    }
    void forward() const {
        const Parts parts(feed.rows, PART_OF_BLOCK);
        distribute(parts.count, feed.threads, feed.rows * weights, [&](int64_t n) { kernels.feed(feed, packs, parts.begin(n), parts.begin(n + 1)); });
    }
    void backward() const {
        const Groups groups(1, feed.rows);
        add_gradients(arena, groups.count(), weights + feed.hidden + 3 * feed.width, feed.threads, feed.rows * weights, feed.d_weights,
                      [&](int64_t n, float *sums) {
                          groups.of(n, [&](int64_t, int64_t, int64_t begin, int64_t end) { kernels.feed_back(feed, packs, begin, end, sums); });
                      });
    }
};

// queries + dropout(output(attention(norm(queries), norm(x))))
struct AttendWork {
    const Attend &attend;
    const Call &call;
    const Kernels &kernels;
    int64_t inner, features, weights, state_size;
    Arena &arena;
    Packs packs{};

    AttendWork(const Attend &attend, Arena &arena)
        : attend(attend), call(attend.call), kernels(*sets()[chosen].kernels(call.feature_map)), inner(call.heads * call.values),
          features(call.heads * call.features), weights(2 * attend.width * (features + inner)), state_size(features * (call.values + 1)), arena(arena) {
        const int64_t width = attend.width, of_head = packed_size(call.features, width);
        packs.first = arena.take<float>(call.heads * of_head), packs.second = arena.take<float>(call.heads * of_head);
        packs.third = arena.take<float>(packed_size(inner, width)), packs.fourth = arena.take<float>(packed_size(width, inner));
        distribute(2 * call.heads + 2, call.threads, weights, [&](int64_t n) {
            const int64_t h = n % call.heads;
            if (n < 2 * call.heads) {
                const Linear &linear = n < call.heads ? attend.query : attend.key;
                const Linear of_it{linear.weight + h * call.features * width, linear.bias ? linear.bias + h * call.features : nullptr};
                kernels.pack(of_it, call.features, width, (n < call.heads ? packs.first : packs.second) + h * of_head);
            } else if (n == 2 * call.heads) {
                kernels.pack(attend.value, inner, width, packs.third);
            } else {
                kernels.pack(attend.output, width, inner, packs.fourth);
            }
        });
    }
    int64_t operations(int64_t tokens) const { return call.batch * tokens * weights; }

    // Adds the states of the parts of each row: kv of all heads, then z.
    void add_states(const float *sums, int64_t parts, float *kv, float *z) const {
        const int64_t products = features * call.values;
        for (int64_t b = 0; b < call.batch; b++)
            for (int64_t n = 0; n < parts; n++) {
                const float *from = sums + (b * parts + n) * state_size;
                for (int64_t i = 0; i < products; i++) kv[b * products + i] += from[i];
                for (int64_t i = 0; i < features; i++) z[b * features + i] += from[products + i];
            }
    }
    void forward() const {
        const Parts keys(call.length, PART_OF_BLOCK), queries(call.queries, PART_OF_BLOCK);
        float *sums = arena.take<float>(call.batch * keys.count * state_size);
        distribute(call.batch * keys.count, call.threads, operations(call.length), [&](int64_t n) {
            float *kv = sums + n * state_size;
            kernels.attend_absorb(attend, packs, n / keys.count, keys.begin(n % keys.count), keys.begin(n % keys.count + 1), kv,
                                  kv + features * call.values);
        });
        add_states(sums, keys.count, call.kv, call.z);
        distribute(call.batch * queries.count, call.threads, operations(call.queries), [&](int64_t n) {
            kernels.attend_read(attend, packs, n / queries.count, queries.begin(n % queries.count), queries.begin(n % queries.count + 1));
        });
    }
    void backward() const {
        const Groups queries(call.batch, call.queries), keys(call.batch, call.length);
        const int64_t size = (features + inner) * attend.width + features + 2 * attend.width;
        float *sums = arena.take<float>(call.batch * queries.parts.count * state_size);
        add_gradients(arena, queries.count(), size + attend.width, call.threads, operations(call.queries), attend.d_reading, [&](int64_t n, float *own) {
            queries.of(n, [&](int64_t b, int64_t part, int64_t begin, int64_t end) {
                float *d_kv = sums + (b * queries.parts.count + part) * state_size;
                kernels.attend_read_back(attend, packs, b, begin, end, d_kv, d_kv + features * call.values, own);
            });
        });
        add_states(sums, queries.parts.count, call.d_kv_in, call.d_z_in);
        add_gradients(arena, keys.count(), size + inner, call.threads, operations(call.length), attend.d_keys, [&](int64_t n, float *own) {
            keys.of(n, [&](int64_t b, int64_t, int64_t begin, int64_t end) { kernels.attend_absorb_back(attend, packs, b, begin, end, own); });
        });
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
EXPORTED int64_t drop_size() { return sizeof(Drop); }
EXPORTED int64_t project_size() { return sizeof(Project); }
EXPORTED int64_t feed_size() { return sizeof(Feed); }
EXPORTED int64_t attend_size() { return sizeof(Attend); }

// The names of the instruction sets that this processor has, the best first; null after the last.
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

EXPORTED int attention(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        if (call->mode == TOTAL) {
            work.sum_parts(call->length, call->kv_in, call->z_in, call->kv, call->z, work.kernels.absorb);
            work.do_parts(call->queries, work.kernels.read);
        } else {
            const bool is_step = call->mode == CAUSAL && call->length == 1 && call->queries == 1 && !call->totals;
            work.each_head(is_step ? work.kernels.step : work.kernels.scan);
        }
    });
}

EXPORTED int attention_back(const Call *call) {
    return succeeds([=] {
        const Work work(*call);
        if (call->mode == TOTAL) {
            work.sum_parts(call->queries, call->d_kv, call->d_z, call->d_kv_in, call->d_z_in, work.kernels.read_back);
            work.do_parts(call->length, work.kernels.absorb_back);
        } else {
            work.each_head(work.kernels.scan_back);
        }
    });
}

EXPORTED int dropout(const Drop *call) {
    const auto drop = sets()[chosen].kernels(0)->drop;
    const int64_t some = std::max<int64_t>(PART_OF_DROPOUT / call->width, 1);
    distribute((call->rows + some - 1) / some, call->threads, call->rows * call->width,
              [=](int64_t n) { drop(*call, n * some, std::min((n + 1) * some, call->rows)); });
    return 1;
}

EXPORTED int project(const Project *call) {
    const auto project = sets()[chosen].kernels(0)->project;
    constexpr int64_t OUTPUTS = 64;
    distribute((call->out + OUTPUTS - 1) / OUTPUTS, call->threads, call->rows * call->in * call->out,
               [=](int64_t n) { project(*call, n * OUTPUTS, std::min((n + 1) * OUTPUTS, call->out)); });
    return 1;
}

EXPORTED int feed_forward(const Feed *call) {
    return succeeds([=] {
        Arena arena;
        FeedWork(*call, arena).forward();
    });
}

EXPORTED int feed_forward_back(const Feed *call) {
    return succeeds([=] {
        Arena arena;
        FeedWork(*call, arena).backward();
    });
}

EXPORTED int attention_block(const Attend *call) {
    return succeeds([=] {
        Arena arena;
        AttendWork(*call, arena).forward();
    });
}

EXPORTED int attention_block_back(const Attend *call) {
    return succeeds([=] {
        Arena arena;
        AttendWork(*call, arena).backward();
    });
}

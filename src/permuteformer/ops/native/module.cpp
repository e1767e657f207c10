// What Python calls, by ctypes: chooses the instruction set and shares out the work. Python has checked everything.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#define ISA module  // what is in the headers is compiled once more for here
#include "arena.h"
#include "call.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using module::Arena;

namespace {

constexpr int64_t PART = 2048;  // tokens of a bidirectional task: of any number of threads, so that sums are always the same
constexpr int64_t SHARE_OF_ROWS = 128;  // tokens of a task of a sublayer, about
constexpr int64_t DROPPED_AT_A_TIME = 1 << 14;

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

// Tokens 0 … length in even parts, as many as is good for threads and not much longer than `about`.
struct Parts {
    int64_t length, count;

    Parts(int64_t length, int64_t about) : length(length), count(length <= about ? 1 : (length + 2 * about - 1) / (2 * about) * 2) {}
    int64_t begin(int64_t n) const { return length * n / count; }
};

// Rows of sequences in groups, of which each adds up gradients of weights by itself: a number of whole rows, or a part of one. Their number
// depends on sizes alone.
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

// Has every group add up its own gradients of weights, `size` of them, by task(n, sums), and adds them to d in order.
template <typename Task>
void add_gradients(Arena &arena, int64_t groups, int64_t size, int64_t threads, int64_t operations, float *d, Task task) {
    float *sums = arena.take<float>(groups * size);
    share_out(groups, threads, operations, [&](int64_t n) {
        std::fill_n(sums + n * size, size, 0.0f);
        task(n, sums + n * size);
    });
    constexpr int64_t SHARE = 1 << 14;
    share_out((size + SHARE - 1) / SHARE, threads, groups * size, [&](int64_t share) {
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
        share_out(2, feed.threads, weights, [&](int64_t n) {
            if (n) {
                kernels.pack(feed.contract, feed.width, feed.hidden, packs.second);
            } else {
                kernels.pack(feed.expand, feed.hidden, feed.width, packs.first);
            }
        });
    }
    void forward() const {
        const Parts parts(feed.rows, SHARE_OF_ROWS);
        share_out(parts.count, feed.threads, feed.rows * weights, [&](int64_t n) { kernels.feed(feed, packs, parts.begin(n), parts.begin(n + 1)); });
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
    int64_t inner, features, weights, carry;
    Arena &arena;
    Packs packs{};

    AttendWork(const Attend &attend, Arena &arena)
        : attend(attend), call(attend.call), kernels(*sets()[chosen].kernels(call.map)), inner(call.heads * call.values),
          features(call.heads * call.features), weights(2 * attend.width * (features + inner)), carry(features * (call.values + 1)), arena(arena) {
        const int64_t width = attend.width, of_head = packed_size(call.features, width);
        packs.first = arena.take<float>(call.heads * of_head), packs.second = arena.take<float>(call.heads * of_head);
        packs.third = arena.take<float>(packed_size(inner, width)), packs.fourth = arena.take<float>(packed_size(width, inner));
        share_out(2 * call.heads + 2, call.threads, weights, [&](int64_t n) {
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

    // Adds up carries of the parts of each row, which lie one after the other: kv of all heads, then z.
    void add_carries(const float *sums, int64_t parts, float *kv, float *z) const {
        const int64_t products = features * call.values;
        for (int64_t b = 0; b < call.batch; b++)
            for (int64_t n = 0; n < parts; n++) {
                const float *from = sums + (b * parts + n) * carry;
                for (int64_t i = 0; i < products; i++) kv[b * products + i] += from[i];
                for (int64_t i = 0; i < features; i++) z[b * features + i] += from[products + i];
            }
    }
    void forward() const {
        const Parts keys(call.length, SHARE_OF_ROWS), queries(call.queries, SHARE_OF_ROWS);
        float *sums = arena.take<float>(call.batch * keys.count * carry);
        share_out(call.batch * keys.count, call.threads, operations(call.length), [&](int64_t n) {
            float *kv = sums + n * carry;
            kernels.attend_absorb(attend, packs, n / keys.count, keys.begin(n % keys.count), keys.begin(n % keys.count + 1), kv,
                                  kv + features * call.values);
        });
        add_carries(sums, keys.count, call.kv, call.z);
        share_out(call.batch * queries.count, call.threads, operations(call.queries), [&](int64_t n) {
            kernels.attend_read(attend, packs, n / queries.count, queries.begin(n % queries.count), queries.begin(n % queries.count + 1));
        });
    }
    void backward() const {
        const Groups queries(call.batch, call.queries), keys(call.batch, call.length);
        const int64_t size = (features + inner) * attend.width + features + 2 * attend.width;
        float *sums = arena.take<float>(call.batch * queries.parts.count * carry);
        add_gradients(arena, queries.count(), size + attend.width, call.threads, operations(call.queries), attend.d_reading, [&](int64_t n, float *own) {
            queries.of(n, [&](int64_t b, int64_t part, int64_t begin, int64_t end) {
                float *d_kv = sums + (b * queries.parts.count + part) * carry;
                kernels.attend_read_back(attend, packs, b, begin, end, d_kv, d_kv + features * call.values, own);
            });
        });
        add_carries(sums, queries.parts.count, call.d_kv, call.d_z);
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
EXPORTED int64_t feed_size() { return sizeof(Feed); }
EXPORTED int64_t attend_size() { return sizeof(Attend); }
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
    const auto drop = sets()[chosen].kernels(0)->drop;
    const int64_t some = std::max<int64_t>(DROPPED_AT_A_TIME / call->width, 1);
    share_out((call->rows + some - 1) / some, call->threads, call->rows * call->width,
              [=](int64_t n) { drop(*call, n * some, std::min((n + 1) * some, call->rows)); });
    return 1;
}

EXPORTED int feed(const Feed *call) {
    return succeeds([=] {
        Arena arena;
        FeedWork(*call, arena).forward();
    });
}

EXPORTED int feed_back(const Feed *call) {
    return succeeds([=] {
        Arena arena;
        FeedWork(*call, arena).backward();
    });
}

EXPORTED int attend(const Attend *call) {
    return succeeds([=] {
        Arena arena;
        AttendWork(*call, arena).forward();
    });
}

EXPORTED int attend_back(const Attend *call) {
    return succeeds([=] {
        Arena arena;
        AttendWork(*call, arena).backward();
    });
}

// Memory that a thread keeps.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace ISA {

// Memory for the buffers of one piece of work, kept by its thread for the next one: it is asked of the system once.
class Arena {
    struct Free {
        void operator()(char *p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    typedef std::unique_ptr<char, Free> Chunk;
    struct Kept {
        std::vector<Chunk> chunks;
        size_t size = 0, used = 0, all = 0;  // of the last chunk; of all chunks
    };
    Kept &kept;

    static Kept &of_thread() {
        static thread_local Kept mine;
        return mine;
    }
    char *bytes(size_t count) {
#if defined(__SANITIZE_ADDRESS__)
        const bool fits = false;  // each by itself, so that what is read or written beside it is seen
#else
        const bool fits = kept.used + count <= kept.size;
#endif
        if (!fits) {
            Chunk chunk(static_cast<char *>(::operator new(count, std::align_val_t(64))));
            kept.chunks.push_back(std::move(chunk));
            kept.size = count;  // now that it is there
            kept.used = 0;
            kept.all += count;
        }
        char *found = kept.chunks.back().get() + kept.used;
        kept.used += count;
        return found;
    }

  public:
    Arena() : kept(of_thread()) {}
    // What was asked for in several chunks will be one, as much again.
    ~Arena() {
        const size_t all = kept.chunks.size() > 1 ? kept.all : 0;
        if (all) {
            kept.chunks.clear();
            kept.size = kept.all = 0;
        }
        kept.used = 0;
        if (!all) return;
        try {
            bytes(all);
        } catch (const std::bad_alloc &) {  // the next one asks again
        }
        kept.used = 0;
    }
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    // Numbers that may be anything.
    template <typename T>
    T *take(size_t count) {
        return reinterpret_cast<T *>(bytes((count * sizeof(T) + 63) / 64 * 64));
    }
    template <typename T>
    T *zeros(size_t count) {
        T *found = take<T>(count);
        std::memset(static_cast<void *>(found), 0, count * sizeof(T));
        return found;
    }
};

}  // namespace ISA

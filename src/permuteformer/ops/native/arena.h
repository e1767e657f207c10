// Scratch memory that each thread keeps for its next task.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace ISA {

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
        const bool fits = false;  // a chunk each, so that the sanitizer sees accesses beyond it
#else
        const bool fits = kept.used + count <= kept.size;
#endif
        if (!fits) {
            kept.chunks.push_back(Chunk(static_cast<char *>(::operator new(count, std::align_val_t(64)))));
            kept.size = count;
            kept.used = 0;
            kept.all += count;
        }
        char *found = kept.chunks.back().get() + kept.used;
        kept.used += count;
        return found;
    }

  public:
    Arena() : kept(of_thread()) {}
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
    // Replaces several chunks by one of their size.
    ~Arena() {
        const size_t all = kept.chunks.size() > 1 ? kept.all : 0;
        if (all) {
            kept.chunks.clear();
            kept.size = kept.all = 0;
            try {
                bytes(all);
            } catch (const std::bad_alloc &) {  // the next task asks again
            }
        }
        kept.used = 0;
    }

    // Uninitialised, aligned to 64 bytes.
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

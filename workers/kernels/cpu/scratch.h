// A thread's own memory, kept from one call to the next, on huge pages, so that address translation costs nothing.
#pragma once

#include <cstdint>
#include <cstdlib>

#ifdef __linux__
#include <sys/mman.h>
#endif

template <typename T>
class Scratch {
  public:
    T* at_least(int64_t count) {
        constexpr int64_t page = int64_t(1) << 21;
        const int64_t num_bytes = (count * int64_t(sizeof(T)) + page - 1) / page * page;
        if (num_bytes > num_bytes_) {
            std::free(data_);
            data_ = static_cast<T*>(std::aligned_alloc(page, num_bytes));
            if (data_ == nullptr) std::abort();  // as the kernel would do when the memory is touched
#ifdef __linux__
            madvise(data_, num_bytes, MADV_HUGEPAGE);
#endif
            num_bytes_ = num_bytes;
        }
        return data_;
    }
    ~Scratch() { std::free(data_); }

  private:
    T* data_ = nullptr;
    int64_t num_bytes_ = 0;
};

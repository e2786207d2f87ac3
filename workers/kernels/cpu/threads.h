// The threads that kernels share their work among. Work is cut into pieces with the same results on any thread, and a thread
// takes the next piece when it has computed one: a thread that has lost its core delays only what it has taken.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

namespace threads {

class Pieces;

struct Job {
    alignas(64) std::atomic<int32_t> num_left{0};  // pieces that no thread has taken
    int32_t num_pieces = 0;                        // this and the following are read only by threads that have a piece
    void (*call)(const void* body, Pieces& pieces) = nullptr;
    const void* body = nullptr;
};

// Pieces of a job as one thread takes them.
class Pieces {
  public:
    explicit Pieces(Job& job) : job_(job) { first_ = take(); }

    bool any() const { return first_ >= 0; }
    int32_t num_taken() const { return num_taken_; }

    // The index of a piece for this thread, or -1: none is left.
    int64_t take() {
        if (first_ >= 0) return std::exchange(first_, -1);
        for (int32_t left = job_.num_left.load(); left > 0;)
            if (job_.num_left.compare_exchange_weak(left, left - 1)) {
                num_taken_++;
                return job_.num_pieces - left;
            }
        return -1;
    }

  private:
    Job& job_;
    int32_t num_taken_ = 0;
    int64_t first_ = -1;
};

void run(int64_t num_pieces, int num_threads, void (*call)(const void* body, Pieces& pieces), const void* body);

// Calls body(pieces) on each thread that gets a piece: on the caller and on up to `num_threads` - 1 others, which are the
// caller's own, start at its first call, and stop when it exits. A body runs further ones on its own thread alone.
template <typename Body>
void share(int64_t num_pieces, int num_threads, const Body& body) {
    run(num_pieces, num_threads,
        [](const void* body, Pieces& pieces) { (*static_cast<const Body*>(body))(pieces); }, &body);
}

// Calls body(index) for each index below `count`.
template <typename Body>
void each(int64_t count, int num_threads, const Body& body) {
    const int64_t num_pieces = num_threads > 1 ? std::min<int64_t>(count, 8 * num_threads) : std::min<int64_t>(count, 1);
    share(num_pieces, num_threads, [&](Pieces& pieces) {
        for (int64_t piece; (piece = pieces.take()) >= 0;)
            for (int64_t i = piece * count / num_pieces; i < (piece + 1) * count / num_pieces; i++) body(i);
    });
}

}  // namespace threads

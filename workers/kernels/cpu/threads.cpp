// A thread that waits polls for some microseconds, as the next piece of work mostly comes that soon, and then sleeps:
// the awaited thread may need its core. A job ends when its pieces are done; threads that took none are not awaited.
#include "threads.h"

#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace threads {
namespace {

constexpr int num_polls = 1000;  // 26 us on an AMD EPYC (Zen 4)

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Returns when `value` is no longer `old`.
void await(std::atomic<int32_t>& value, int32_t old, std::atomic<int32_t>& num_asleep) {
    for (int i = 0; i < num_polls; i++, pause())
        if (value.load() != old) return;
    num_asleep++;
    value.wait(old);
    num_asleep--;
}

thread_local bool is_in_body = false;

void compute(Job& job, Pieces& pieces) {
    is_in_body = true;
    job.call(job.body, pieces);
    is_in_body = false;
}

class Pool {
  public:
    explicit Pool(int num_threads) : num_threads(num_threads) {
        try {
            for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {  // the system has no more threads: those that started do
        }
    }

    ~Pool() {
        job_.num_left = -1;
        job_.num_left.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    void run(int32_t num_pieces, void (*call)(const void* body, Pieces& pieces), const void* body) {
        job_.num_pieces = num_pieces, job_.call = call, job_.body = body;
        num_done_ = 0;
        job_.num_left = num_pieces;
        if (num_workers_asleep_ > 0) job_.num_left.notify_all();
        Pieces pieces(job_);
        if (pieces.any()) compute(job_, pieces);
        num_done_ += pieces.num_taken();
        for (int32_t done; (done = num_done_) < num_pieces;) await(num_done_, done, num_callers_asleep_);
    }

    const int num_threads;

  private:
    void work() {
        while (job_.num_left >= 0) {
            Pieces pieces(job_);
            if (pieces.any()) {
                compute(job_, pieces);
                num_done_ += pieces.num_taken();
                if (num_callers_asleep_ > 0) num_done_.notify_all();
            } else {
                await(job_.num_left, 0, num_workers_asleep_);
            }
        }
    }

    Job job_;
    alignas(64) std::atomic<int32_t> num_done_{0};
    std::atomic<int32_t> num_workers_asleep_{0}, num_callers_asleep_{0};
    std::vector<std::thread> workers_;
};

thread_local std::unique_ptr<Pool> pool;

#if defined(__unix__) || defined(__APPLE__)
// A child process has the thread that forked, and none of its pool.
const int registered = pthread_atfork(nullptr, nullptr, [] { (void)pool.release(); });
#endif

}  // namespace

void run(int64_t num_pieces, int num_threads, void (*call)(const void* body, Pieces& pieces), const void* body) {
    if (num_pieces <= 1 || num_threads <= 1 || is_in_body) {
        Job job;
        job.num_left = job.num_pieces = int32_t(num_pieces);
        Pieces pieces(job);
        if (pieces.any()) call(body, pieces);
        return;
    }
    if (pool == nullptr || pool->num_threads != num_threads) {
        pool.reset();
        pool = std::make_unique<Pool>(num_threads);
    }
    pool->run(int32_t(num_pieces), call, body);
}

}  // namespace threads

// A small persistent thread pool: ranges are claimed from one atomic ticket, idle threads spin briefly, then sleep.

#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "export.h"

namespace meshfire {
namespace {

// About 100 µs on current CPUs: longer than the gap between two kernels of a layer, shorter than a scheduler's slice.
constexpr int kSpins = 2000;
constexpr int64_t kRangesPerThread = 4;  // so that a thread that is held up leaves its share to the others
constexpr int64_t kMaxRanges = 0xFFFF;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

thread_local bool inside_loop = false;

class Pool {
   public:
    int size() const { return size_.load(std::memory_order_relaxed); }

    void resize(int threads) {
        std::lock_guard<std::mutex> turn(turn_);
        size_.store(std::max(threads, 1));
        for (; started_ < size() - 1; ++started_) std::thread(&Pool::serve, this, started_ + 1).detach();
    }

    // False = another loop has the threads.
    bool run(int64_t count, int64_t range, Body body, void* context) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return false;
        const int64_t ranges = (count + range - 1) / range;
        count_ = count, range_ = range, body_ = body, context_ = context;
        unfinished_.store(ranges, std::memory_order_relaxed);
        const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(generation << 32 | static_cast<uint64_t>(ranges));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> awake(sleep_);
            wake_.notify_all();
        }
        inside_loop = true;
        while (claim()) {
        }
        inside_loop = false;
        for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
            if (spins < kSpins) pause();
            else sched_yield();
        }
        return true;
    }

   private:
    // The ticket is (generation: 32 bits, next range: 16, ranges: 16). A claimed range keeps its loop alive, so what the
    // loop's fields say after a claim is of that loop.
    bool claim() {
        uint64_t ticket = ticket_.load();
        for (;;) {
            const int64_t next = ticket >> 16 & 0xFFFF;
            if (next >= static_cast<int64_t>(ticket & 0xFFFF)) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 0x10000)) {
                body_(context_, next * range_, std::min(count_, (next + 1) * range_));
                unfinished_.fetch_sub(1, std::memory_order_release);
                return true;
            }
        }
    }

    bool idle(int index) const {
        const uint64_t ticket = ticket_.load();
        return index >= size() || (ticket >> 16 & 0xFFFF) >= (ticket & 0xFFFF);
    }

    void serve(int index) {
        inside_loop = true;
        for (;;) {
            for (int spins = 0; idle(index) && spins < kSpins; ++spins) pause();
            if (idle(index)) {
                std::unique_lock<std::mutex> asleep(sleep_);
                sleepers_.fetch_add(1);
                wake_.wait(asleep, [&] { return !idle(index); });
                sleepers_.fetch_sub(1);
            }
            while (index < size() && claim()) {
            }
        }
    }

    std::mutex turn_, sleep_;
    std::condition_variable wake_;
    std::atomic<int> size_{1}, sleepers_{0};
    int started_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> unfinished_{0};
    int64_t count_ = 0, range_ = 1;
    Body body_ = nullptr;
    void* context_ = nullptr;
};

// Never destroyed: its threads may outlive static objects.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        the_pool.store(new Pool);
        pthread_atfork(nullptr, nullptr, [] {
            const int threads = the_pool.load()->size();
            the_pool.store(new Pool);  // the parent's threads and locks are not the child's
            inside_loop = false;
            if (threads > 1) the_pool.load()->resize(threads);
        });
    });
    return *the_pool.load();
}

}  // namespace

int num_threads() { return pool().size(); }

void parallel_ranges(int64_t count, int64_t grain, Body body, void* context) {
    if (count <= 0) return;
    const int64_t threads = pool().size();
    if (threads > 1 && !inside_loop && count > grain) {
        const int64_t most = std::min(kMaxRanges, threads * kRangesPerThread);
        const int64_t range = std::max<int64_t>({grain, 1, (count + most - 1) / most});
        if (pool().run(count, range, body, context)) return;
    }
    body(context, 0, count);
}

}  // namespace meshfire

// Threads that kernels use from now on, the caller's included; 1 = the caller alone.
MESHFIRE_EXPORT void meshfire_set_threads(int32_t threads) { meshfire::pool().resize(threads); }

MESHFIRE_EXPORT int32_t meshfire_num_threads() { return meshfire::num_threads(); }

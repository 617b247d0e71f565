// The threads that every kernel shares, and how a loop is spread over them.
//
// The calling thread works too. A loop that starts while another one has the threads, or inside one, runs on its caller
// alone: results never depend on how many threads took part. After fork() the child starts with no threads of its own.
#pragma once

#include <cstdint>
#include <type_traits>

namespace meshfire {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Threads that loops use, the caller's included.
int num_threads();

// Calls body on consecutive ranges that cover [0, count), in any order, on any thread; returns when all are done.
// `grain` is the least length of a range (the last may be shorter).
void parallel_ranges(int64_t count, int64_t grain, Body body, void* context);

// body(begin, end) on ranges of [0, count).
template <class Function>
void parallel_for(int64_t count, int64_t grain, Function&& body) {
    using Plain = std::remove_reference_t<Function>;
    parallel_ranges(
        count, grain,
        [](void* context, int64_t begin, int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace meshfire

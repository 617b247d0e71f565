// How a product walks over weights in panels of 32 outputs: what the integer and the float products have in common.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "pool.h"

namespace meshfire {

constexpr int kPanel = 32;             // outputs of a panel: two groups of 16
constexpr int kGroup = kPanel / 2;
constexpr int64_t kRowChunk = 96;      // rows that stay in the second-level cache while panels go by

// Rows of every tile but the last: at most `max_rows`, and such that tiles are of nearly equal height.
inline int64_t tile_height(int64_t count, int64_t max_rows) {
    const int64_t most = std::max<int64_t>(1, std::min(count, kRowChunk));
    const int64_t num_tiles = (most + max_rows - 1) / max_rows;
    return (most + num_tiles - 1) / num_tiles;
}

// Calls run(panel, first row, rows) for every tile of `height` rows and every panel; panels are spread over threads.
template <class Run>
void for_each_tile(int64_t num_panels, int64_t count, int64_t height, Run run) {
    const int64_t chunk = std::max<int64_t>(1, kRowChunk / height) * height;
    parallel_for(num_panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t start = 0; start < count; start += chunk)
            for (int64_t panel = begin; panel < end; ++panel)
                for (int64_t row = start; row < std::min(count, start + chunk); row += height)
                    run(panel, row, static_cast<int>(std::min(height, count - row)));
    });
}

// A table of Kernel<1>::run … Kernel<MAX>::run, so that the number of rows of a tile is known to the compiler.
template <template <int> class Kernel, int MAX>
struct ByRows {
    template <int... ROWS>
    static constexpr auto table(std::integer_sequence<int, ROWS...>) {
        return std::array{&Kernel<ROWS + 1>::run...};
    }
    static constexpr auto all = table(std::make_integer_sequence<int, MAX>());
};

}  // namespace meshfire

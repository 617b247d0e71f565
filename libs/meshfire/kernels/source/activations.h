// Rows of inputs as 16-bit integers with one scale each.
#pragma once

#include <cstdint>
#include <vector>

namespace meshfire {

// Kept by the calling thread from call to call, so that a product allocates nothing. Rows lie in tiles of `height` (the
// last one shorter), in the order in which a product reads them: for each pair of inputs, that pair of every row.
struct QuantizedRows {
    std::vector<int16_t> values;  // tiles of [pairs, rows of the tile, 2], zeros beyond the inputs
    std::vector<float> scales;    // [rows]; NaN for a row that holds NaN or infinity, whose values are then 0
    int64_t pairs = 0;
    int64_t height = 1;

    const int16_t* tile(int64_t first_row) const { return values.data() + first_row * pairs * 2; }
};

// `rows` [count, size] to integers of at most `limit` in size: value = input x (limit / greatest), rounded to the nearest
// even; scale = greatest / limit. Each row is a function of that row alone. 
void quantize_rows(const float* rows, int64_t count, int64_t size, int32_t limit, int64_t height, QuantizedRows& out);

// The calling thread's buffer.
QuantizedRows& scratch_rows();

}  // namespace meshfire

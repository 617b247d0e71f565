// Rows of inputs as 16-bit integers with one scale each.
#pragma once

#include <cstdint>
#include <vector>

namespace meshfire {

// Kept by the calling thread from call to call, so that a product allocates nothing.
struct QuantizedRows {
    std::vector<int16_t> values;  // [rows, stride], zeros beyond the inputs
    std::vector<float> scales;    // [rows]; NaN for a row that holds NaN or infinity, whose values are then 0
    int64_t stride = 0;

    const int16_t* row(int64_t index) const { return values.data() + index * stride; }
};

// `rows` [count, size] to integers of at most `limit` in size: value = input x (limit / greatest), rounded to the nearest
// even; scale = greatest / limit. Each row is a function of that row alone. `stride` >= size.
void quantize_rows(const float* rows, int64_t count, int64_t size, int64_t stride, int32_t limit, QuantizedRows& out);

// The calling thread's buffer.
QuantizedRows& scratch_rows();

}  // namespace meshfire

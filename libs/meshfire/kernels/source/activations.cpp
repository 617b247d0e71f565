// Quantisation of activations: two passes over a row that is in cache, written so that any compiler vectorises them.

#include "activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pool.h"

namespace meshfire {
namespace {

constexpr int64_t kRowGrain = 4;
constexpr float kLeast = 1e-30F;            // below it a row counts as zeros: limit / greatest must stay finite
constexpr float kRounder = 12582912.0F;     // 1.5 x 2^23: adding and subtracting it rounds to the nearest even integer
constexpr uint32_t kMagnitude = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;

// Bit patterns of magnitudes are ordered like their values, and infinity and NaN come last.
float greatest(const float* row, int64_t size) {
    uint32_t most = 0;
    for (int64_t i = 0; i < size; ++i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        most = std::max(most, bits & kMagnitude);
    }
    if (most >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
    float value;
    std::memcpy(&value, &most, sizeof value);
    return value;
}

float quantize_row(const float* row, int64_t size, int32_t limit, int16_t* out) {
    const float most = greatest(row, size);
    if (!(most >= kLeast)) {
        std::fill_n(out, size, int16_t{0});
        return std::isnan(most) ? most : 0.0F;
    }
    const float factor = static_cast<float>(limit) / most;
    for (int64_t i = 0; i < size; ++i) {
        const float rounded = (row[i] * factor + kRounder) - kRounder;
        out[i] = static_cast<int16_t>(static_cast<int32_t>(rounded));
    }
    return most / static_cast<float>(limit);
}

}  // namespace

void quantize_rows(const float* rows, int64_t count, int64_t size, int64_t stride, int32_t limit, QuantizedRows& out) {
    out.stride = stride;
    out.values.resize(count * stride);
    out.scales.resize(count);
    parallel_for(count, kRowGrain, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            int16_t* values = out.values.data() + r * stride;
            out.scales[r] = quantize_row(rows + r * size, size, limit, values);
            std::fill(values + size, values + stride, int16_t{0});
        }
    });
}

QuantizedRows& scratch_rows() {
    thread_local QuantizedRows buffer;
    return buffer;
}

}  // namespace meshfire

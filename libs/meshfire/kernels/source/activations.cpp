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

void quantize_rows(const float* rows, int64_t count, int64_t size, int32_t limit, int64_t height, QuantizedRows& out) {
    const int64_t pairs = (size + 1) / 2;
    out.pairs = pairs;
    out.height = height;
    out.values.resize(count * pairs * 2);
    out.scales.resize(count);
    parallel_for(count, kRowGrain, [&](int64_t begin, int64_t end) {
        thread_local std::vector<int16_t> row;
        row.resize(pairs * 2);
        row.back() = 0;
        for (int64_t r = begin; r < end; ++r) {
            out.scales[r] = quantize_row(rows + r * size, size, limit, row.data());
            const int64_t first = r / height * height;
            const int64_t tall = std::min(height, count - first);
            int16_t* target = out.values.data() + first * pairs * 2 + (r - first) * 2;
            for (int64_t p = 0; p < pairs; ++p) std::memcpy(target + p * tall * 2, row.data() + p * 2, 2 * sizeof(int16_t));
        }
    });
}

QuantizedRows& scratch_rows() {
    thread_local QuantizedRows buffer;
    return buffer;
}

}  // namespace meshfire

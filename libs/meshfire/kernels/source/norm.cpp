// Root-mean-square normalisation of rows, with the addition that comes before it in a decoder.
//
// Squares are exact in double; their sum has 16 lanes in one order, whatever the instruction set, and is far more precise
// than the float32 that it ends as.

#include <cmath>
#include <cstdint>

#include "export.h"
#include "pool.h"

namespace {

constexpr int kSums = 16;
constexpr int64_t kRowGrain = 8;

double sum_of_squares(const float* row, int64_t size) {
    double sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums <= size; i += kSums)
        for (int j = 0; j < kSums; ++j) sums[j] += static_cast<double>(row[i + j]) * static_cast<double>(row[i + j]);
    for (int j = 0; i + j < size; ++j) sums[j] += static_cast<double>(row[i + j]) * static_cast<double>(row[i + j]);
    for (int width = kSums / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
    return sums[0];
}

}  // namespace

// rows [count, size] += added (unless null); out = rows / sqrt(mean of squares + eps) x weight [size].
MESHFIRE_EXPORT void meshfire_rms_norm(float* rows, const float* added, int64_t count, int64_t size, const float* weight,
                                       double eps, float* out) {
    meshfire::parallel_for(count, kRowGrain, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = rows + r * size;
            if (added) {
                const float* more = added + r * size;
                for (int64_t i = 0; i < size; ++i) row[i] += more[i];
            }
            const double mean = sum_of_squares(row, size) / static_cast<double>(size);
            const float factor = static_cast<float>(1.0 / std::sqrt(mean + eps));
            float* target = out + r * size;
            for (int64_t i = 0; i < size; ++i) target[i] = row[i] * factor * weight[i];
        }
    });
}

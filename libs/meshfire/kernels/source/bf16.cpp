// Products with bfloat16 weights and float32 activations, summed in float32: every output adds its inputs one by one in
// order, by fused steps, so a row's result is the same in any tile, on any thread and in any vector width.
//
// Weights lie in panels of 32 outputs: for each input, 32 numbers.

#include <cstdint>
#include <vector>

#include "export.h"
#include "float_lanes.h"
#include "panels.h"
#include "silu.h"

namespace meshfire {
namespace {

constexpr int64_t kAheadNumbers = 1024;  // prefetch distance

template <int ROWS>
struct Tile {
    // sums[r][j] = sum over k of panel[k][j] x rows[r][k]
    static void run(const uint16_t* panel, int64_t inputs, const float* rows, float* sums) {
        for (int half = 0; half < 2; half += FloatLanes::kHalves) {
            FloatLanes::Values total[ROWS][FloatLanes::kHalves];
            for (auto& row : total)
                for (auto& sum : row) sum = FloatLanes::zero();
            const uint16_t* weights = panel + half * kGroup;
            for (int64_t k = 0; k < inputs; ++k, weights += kPanel) {
                __builtin_prefetch(weights + kAheadNumbers);
                FloatLanes::Values wide[FloatLanes::kHalves];
                for (int h = 0; h < FloatLanes::kHalves; ++h) wide[h] = FloatLanes::load(weights + h * kGroup);
                for (int r = 0; r < ROWS; ++r) {
                    const FloatLanes::Values input = FloatLanes::spread(rows[r * inputs + k]);
                    for (int h = 0; h < FloatLanes::kHalves; ++h)
                        total[r][h] = FloatLanes::add_product(total[r][h], wide[h], input);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int h = 0; h < FloatLanes::kHalves; ++h)
                    FloatLanes::store(sums + r * kPanel + (half + h) * kGroup, total[r][h]);
        }
    }
};

template <class Finish>
void product(const uint16_t* panels, int64_t num_panels, int64_t inputs, const float* rows, int64_t count, Finish finish) {
    for_each_tile(num_panels, count, tile_height(count, FloatLanes::kMaxRows), [&](int64_t panel, int64_t first, int tall) {
        alignas(64) float sums[FloatLanes::kMaxRows * kPanel];
        const auto run = ByRows<Tile, FloatLanes::kMaxRows>::all[tall - 1];
        run(panels + panel * inputs * kPanel, inputs, rows + first * inputs, sums);
        for (int r = 0; r < tall; ++r) finish(panel, first + r, sums + r * kPanel);
    });
}

void linear(const uint16_t* panels, const float* bias, int64_t inputs, int64_t outputs, const float* rows, int64_t count,
            float* out) {
    product(panels, (outputs + kPanel - 1) / kPanel, inputs, rows, count,
            [&](int64_t panel, int64_t row, const float* sums) {
                const int64_t column = panel * kPanel;
                const int64_t wide = std::min<int64_t>(kPanel, outputs - column);
                float* target = out + row * outputs + column;
                for (int64_t j = 0; j < wide; ++j) target[j] = bias ? sums[j] + bias[column + j] : sums[j];
            });
}

void gated(const uint16_t* panels, int64_t inputs, int64_t neurons, const float* rows, int64_t count, float* out) {
    product(panels, (neurons + kGroup - 1) / kGroup, inputs, rows, count,
            [&](int64_t panel, int64_t row, const float* sums) {
                const int64_t column = panel * kGroup;
                float values[kGroup];
                for (int j = 0; j < kGroup; ++j) values[j] = silu_strict(sums[j]) * sums[j + kGroup];
                std::copy_n(values, std::min<int64_t>(kGroup, neurons - column), out + row * neurons + column);
            });
}

}  // namespace
}  // namespace meshfire

using namespace meshfire;

// out [count, outputs] = rows [count, inputs] x weights^T (+ bias, may be null).
MESHFIRE_EXPORT void meshfire_bf16_linear(const float* rows, int64_t count, int64_t inputs, const uint16_t* panels,
                                          const float* bias, int64_t outputs, float* out) {
    linear(panels, bias, inputs, outputs, rows, count, out);
}

// out [count, neurons] = silu(gate rows) x (up rows).
MESHFIRE_EXPORT void meshfire_bf16_gated(const float* rows, int64_t count, int64_t inputs, const uint16_t* panels,
                                         int64_t neurons, float* out) {
    gated(panels, inputs, neurons, rows, count, out);
}

// out [count, outputs] = down(silu(gate rows) x (up rows)), the bits of the two calls above one after the other.
MESHFIRE_EXPORT void meshfire_bf16_ffn(const float* rows, int64_t count, int64_t inputs, const uint16_t* panels,
                                       int64_t neurons, const uint16_t* down_panels, int64_t outputs, float* out) {
    thread_local std::vector<float> inner;
    inner.resize(count * neurons);
    float* values = inner.data();
    gated(panels, inputs, neurons, rows, count, values);
    linear(down_panels, nullptr, neurons, outputs, values, count, out);
}

// Products with int8 weights and 16-bit activations, summed exactly in 32 bits.
//
// Weights lie in panels of 32 outputs: for each pair of inputs (k, k + 1), 16 outputs x 2 bytes, then the other 16. A
// panel is read front to back once per tile of rows. Sums are exact, so neither rows, tiles nor threads show in a result;
// the float steps after them are per element. The caller bounds activations so that no sum leaves 32 bits.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "export.h"
#include "lanes.h"
#include "panels.h"
#include "silu.h"

namespace meshfire {
namespace {

constexpr int64_t kPairBytes = 2 * kPanel;
constexpr int64_t kAheadBytes = 2048;  // prefetch distance within and beyond a panel

struct Weights {
    const int8_t* panels;  // [ceil(outputs / 32)] panels of pairs x 64 bytes
    const float* scales;   // [outputs, padded to panels]
    int64_t pairs;

    const int8_t* panel(int64_t index) const { return panels + index * pairs * kPairBytes; }
};

// `rows`: a tile of QuantizedRows. sums[r][j] = sum over k of panel[j][k] x rows[r][k], for HALVES groups of 16 outputs starting at `panel`.
template <int ROWS, int HALVES, int UNROLL>
inline void tile(const int8_t* panel, int64_t pairs, const int16_t* rows, int32_t* sums) {
    Lanes::Sum total[UNROLL][ROWS][HALVES];
    for (auto& step : total)
        for (auto& row : step)
            for (auto& sum : row) sum = Lanes::zero();
    const auto step = [&](int64_t p, Lanes::Sum(&into)[ROWS][HALVES]) {
        Lanes::Pairs weights[HALVES];
        for (int h = 0; h < HALVES; ++h) weights[h] = Lanes::widen(panel + p * kPairBytes + h * kPanel);
        __builtin_prefetch(panel + p * kPairBytes + kAheadBytes);
        for (int r = 0; r < ROWS; ++r) {
            const Lanes::Pairs inputs = Lanes::spread(rows + (p * ROWS + r) * 2);
            for (int h = 0; h < HALVES; ++h) into[r][h] = Lanes::add_products(into[r][h], weights[h], inputs);
        }
    };
    int64_t p = 0;
    for (; p + UNROLL <= pairs; p += UNROLL)
        for (int u = 0; u < UNROLL; ++u) step(p + u, total[u]);
    for (; p < pairs; ++p) step(p, total[0]);
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < HALVES; ++h) {
            Lanes::Sum sum = total[0][r][h];
            for (int u = 1; u < UNROLL; ++u) sum = Lanes::add(sum, total[u][r][h]);
            Lanes::store(sums + r * kPanel + h * kGroup, sum);
        }
}

template <int ROWS>
struct PanelSums {
    static void run(const int8_t* panel, int64_t pairs, const int16_t* rows, int32_t* sums) {
        constexpr int unroll = ROWS == 1 ? 4 : ROWS == 2 && Lanes::kHalves == 2 ? 2 : 1;  // enough sums in flight
        for (int half = 0; half < 2; half += Lanes::kHalves)
            tile<ROWS, Lanes::kHalves, unroll>(panel + half * kPanel, pairs, rows, sums + half * kGroup);
    }
};

// Calls finish(panel, row, its 32 sums) for every row and panel.
template <class Finish>
void product(const Weights& weights, int64_t num_panels, const QuantizedRows& rows, int64_t count, Finish finish) {
    for_each_tile(num_panels, count, rows.height, [&](int64_t panel, int64_t first, int tall) {
        alignas(64) int32_t sums[Lanes::kMaxRows * kPanel];
        const auto run = ByRows<PanelSums, Lanes::kMaxRows>::all[tall - 1];
        run(weights.panel(panel), weights.pairs, rows.tile(first), sums);
        for (int r = 0; r < tall; ++r) finish(panel, first + r, sums + r * kPanel);
    });
}

void linear(const Weights& weights, const float* bias, int64_t outputs, const QuantizedRows& rows, int64_t count,
            float* out) {
    product(weights, (outputs + kPanel - 1) / kPanel, rows, count, [&](int64_t panel, int64_t row, const int32_t* sums) {
        const int64_t column = panel * kPanel;
        const int64_t wide = std::min<int64_t>(kPanel, outputs - column);
        const float* scales = weights.scales + column;
        const float scale = rows.scales[row];
        float* target = out + row * outputs + column;
        for (int64_t j = 0; j < wide; ++j) target[j] = static_cast<float>(sums[j]) * scale * scales[j];
        if (bias)
            for (int64_t j = 0; j < wide; ++j) target[j] += bias[column + j];
    });
}

// Each panel has 16 neurons: their gates, then their ups. out [count, neurons].
void gated(const Weights& weights, int64_t neurons, const QuantizedRows& rows, int64_t count, float* out) {
    product(weights, (neurons + kGroup - 1) / kGroup, rows, count, [&](int64_t panel, int64_t row, const int32_t* sums) {
        const int64_t column = panel * kGroup;
        const float* scales = weights.scales + panel * kPanel;
        const float scale = rows.scales[row];
        float values[kGroup];
        for (int j = 0; j < kGroup; ++j) {
            const float gate = static_cast<float>(sums[j]) * scale * scales[j];
            const float up = static_cast<float>(sums[j + kGroup]) * scale * scales[j + kGroup];
            values[j] = silu_strict(gate) * up;
        }
        std::copy_n(values, std::min<int64_t>(kGroup, neurons - column), out + row * neurons + column);
    });
}

}  // namespace
}  // namespace meshfire

using namespace meshfire;

namespace {

Weights weights_of(const int8_t* panels, const float* scales, int64_t inputs) {
    return {panels, scales, (inputs + 1) / 2};
}

const QuantizedRows& quantized(const float* rows, int64_t count, int64_t inputs, int64_t limit) {
    QuantizedRows& integers = scratch_rows();
    quantize_rows(rows, count, inputs, static_cast<int32_t>(limit), tile_height(count, Lanes::kMaxRows), integers);
    return integers;
}

}  // namespace

// out [count, outputs] = rows [count, inputs] x weights^T x scales (+ bias, may be null).
MESHFIRE_EXPORT void meshfire_int8_linear(const float* rows, int64_t count, int64_t inputs, int64_t limit,
                                          const int8_t* panels, const float* scales, const float* bias, int64_t outputs,
                                          float* out) {
    linear(weights_of(panels, scales, inputs), bias, outputs, quantized(rows, count, inputs, limit), count, out);
}

// out [count, neurons] = silu(gate rows) x (up rows).
MESHFIRE_EXPORT void meshfire_int8_gated(const float* rows, int64_t count, int64_t inputs, int64_t limit,
                                         const int8_t* panels, const float* scales, int64_t neurons, float* out) {
    gated(weights_of(panels, scales, inputs), neurons, quantized(rows, count, inputs, limit), count, out);
}

// out [count, outputs] = down(silu(gate rows) x (up rows)), the bits of the two calls above one after the other.
MESHFIRE_EXPORT void meshfire_int8_ffn(const float* rows, int64_t count, int64_t inputs, int64_t limit,
                                       const int8_t* panels, const float* scales, int64_t neurons, int64_t down_limit,
                                       const int8_t* down_panels, const float* down_scales, int64_t outputs, float* out) {
    thread_local std::vector<float> inner;
    inner.resize(count * neurons);
    float* values = inner.data();
    gated(weights_of(panels, scales, inputs), neurons, quantized(rows, count, inputs, limit), count, values);
    const QuantizedRows& integers = quantized(values, count, neurons, down_limit);
    linear(weights_of(down_panels, down_scales, neurons), nullptr, outputs, integers, count, out);
}

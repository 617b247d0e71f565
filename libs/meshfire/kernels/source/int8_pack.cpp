// From float32 weights to the panels of int8.cpp: symmetric, one scale per output, the bits of `int8_pack.py` in torch.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "export.h"
#include "panels.h"

using meshfire::kGroup;
using meshfire::kPanel;
using meshfire::parallel_for;

namespace {

constexpr float kRounder = 12582912.0F;  // 1.5 x 2^23, see activations.cpp

// Weights that are not finite give a NaN scale, hence NaN products.
float greatest(const float* row, int64_t size) {
    float most = 0.0F;
    bool finite = true;
    for (int64_t k = 0; k < size; ++k) {
        const float value = std::fabs(row[k]);
        finite &= value <= 3.4028234e38F;
        most = value > most ? value : most;
    }
    return finite ? most : NAN;
}

// One row into every (2 x 32)th byte pair of its panel.
float pack_row(const float* row, int64_t inputs, int8_t* target) {
    const float scale = greatest(row, inputs) / 127.0F;
    const float factor = scale > 0.0F ? 1.0F / scale : 0.0F;
    const auto rounded = [&](int64_t k) {
        const float value = (row[k] * factor + kRounder) - kRounder;
        return static_cast<int8_t>(static_cast<int32_t>(std::min(std::max(value, -127.0F), 127.0F)));
    };
    if (!(scale > 0.0F)) return scale;  // the panel is zeros already
    for (int64_t k = 0; k < inputs; ++k) target[k / 2 * 2 * kPanel + k % 2] = rounded(k);
    return scale;
}

}  // namespace

// `panels` and `scales` come zeroed. With `second`, each panel has 16 rows of `first`, then the same rows of `second`.
MESHFIRE_EXPORT void meshfire_int8_pack(const float* first, const float* second, int64_t rows, int64_t inputs,
                                        int8_t* panels, float* scales) {
    const int64_t rows_each = second ? kGroup : kPanel;
    const int64_t panel_bytes = (inputs + 1) / 2 * 2 * kPanel;
    parallel_for((rows + rows_each - 1) / rows_each, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t j = 0; j < kPanel; ++j) {
                const int64_t row = panel * rows_each + j % rows_each;
                if (row >= rows) continue;
                const float* source = (j >= rows_each ? second : first) + row * inputs;
                scales[panel * kPanel + j] = pack_row(source, inputs, panels + panel * panel_bytes + j * 2);
            }
    });
}

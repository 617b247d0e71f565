// silu(x) = x / (1 + exp(-x)) from additions, multiplications and one division, each rounded once: the same bits in any
// vector width, and in torch (`kernels/int8.py` spells out the same steps).
#pragma once

#include <cstdint>
#include <cstring>

namespace meshfire {

// exp(x) to about 1 ulp; x is held within [-87, 87]. NaN stays NaN. Polynomial: Taylor to the 7th power on |r| <= ln 2 / 2.
inline float exp_strict(float x) {
    x = x < -87.0F ? -87.0F : x;
    x = x > 87.0F ? 87.0F : x;
    const float shifted = x * 1.44269504F + 12582912.0F;
    const float n = shifted - 12582912.0F;
    const float r = (x - n * 0.693359375F) - n * -2.12194440e-4F;
    float p = 1.98412698e-4F;
    p = p * r + 1.38888889e-3F;
    p = p * r + 8.33333333e-3F;
    p = p * r + 4.16666667e-2F;
    p = p * r + 1.66666667e-1F;
    p = p * r + 0.5F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = static_cast<int32_t>((static_cast<uint32_t>(bits) << 23) + 0x3F800000U);  // 2^n: n is in the lowest bits
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float silu_strict(float x) { return x / (1.0F + exp_strict(-x)); }

}  // namespace meshfire

// Sixteen float32 sums side by side. Each step is one fused multiplication and addition per sum, so all forms give the same
// bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(MESHFIRE_SCALAR) && defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace meshfire {

#if !defined(MESHFIRE_SCALAR) && defined(__AVX512F__)

struct FloatLanes {
    using Values = __m512;
    static constexpr int kMaxRows = 8;
    static constexpr int kHalves = 2;

    static Values zero() { return _mm512_setzero_ps(); }
    static Values load(const float* from) { return _mm512_loadu_ps(from); }
    static Values load(const uint16_t* from) {  // bfloat16 is the upper half of a float32
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static Values spread(float value) { return _mm512_set1_ps(value); }
    static Values add_product(Values sum, Values one, Values other) { return _mm512_fmadd_ps(one, other, sum); }
    static void store(float* to, Values sum) { _mm512_storeu_ps(to, sum); }
};

#elif !defined(MESHFIRE_SCALAR) && defined(__AVX2__) && defined(__FMA__)

struct FloatLanes {
    struct Values {
        __m256 low, high;
    };
    static constexpr int kMaxRows = 4;
    static constexpr int kHalves = 1;

    static Values zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static Values load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static Values load(const uint16_t* from) { return {widen(from), widen(from + 8)}; }
    static Values spread(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    static Values add_product(Values sum, Values one, Values other) {
        return {_mm256_fmadd_ps(one.low, other.low, sum.low), _mm256_fmadd_ps(one.high, other.high, sum.high)};
    }
    static void store(float* to, Values sum) {
        _mm256_storeu_ps(to, sum.low);
        _mm256_storeu_ps(to + 8, sum.high);
    }

   private:
    static __m256 widen(const uint16_t* from) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};

#else

struct FloatLanes {
    struct Values {
        float at[16];
    };
    static constexpr int kMaxRows = 4;
    static constexpr int kHalves = 1;

    static Values zero() { return {}; }
    static Values load(const float* from) {
        Values values;
        std::memcpy(values.at, from, sizeof values.at);
        return values;
    }
    static Values load(const uint16_t* from) {
        Values values;
        for (int i = 0; i < 16; ++i) {
            const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
            std::memcpy(values.at + i, &bits, sizeof bits);
        }
        return values;
    }
    static Values spread(float value) {
        Values values;
        for (float& one : values.at) one = value;
        return values;
    }
    static Values add_product(Values sum, const Values& one, const Values& other) {
        for (int i = 0; i < 16; ++i) sum.at[i] = std::fma(one.at[i], other.at[i], sum.at[i]);
        return sum;
    }
    static void store(float* to, const Values& sum) { std::memcpy(to, sum.at, sizeof sum.at); }
};

#endif

}  // namespace meshfire

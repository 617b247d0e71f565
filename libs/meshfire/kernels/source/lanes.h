// Sixteen 32-bit sums side by side, in the widest registers at hand: the one place that knows the instruction set of
// integer products. All forms give the same bits: integers do not round.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(MESHFIRE_SCALAR) && (defined(__AVX512VNNI__) || defined(__AVX2__))
#include <immintrin.h>
#endif

namespace meshfire {

constexpr int kLanes = 16;

#if !defined(MESHFIRE_SCALAR) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

// `Pairs`: two neighbouring inputs (k, k + 1) of each of 16 outputs, as 16-bit numbers.
struct Lanes {
    using Sum = __m512i;
    using Pairs = __m512i;
    static constexpr int kMaxRows = 8;   // rows of a tile: 2 x 8 sums and what feeds them fit the 32 registers
    static constexpr int kHalves = 2;    // groups of 16 outputs that a tile sums at once

    static Sum zero() { return _mm512_setzero_si512(); }
    static Pairs widen(const int8_t* weights) {
        return _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(weights)));
    }
    static Pairs widen_nibbles(const uint8_t* weights) {  // low nibble = k, high nibble = k + 1
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(weights)));
        return _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), _mm512_set1_epi32(0x000F000F));
    }
    static Pairs spread(const int16_t* inputs) {
        int32_t pair;
        std::memcpy(&pair, inputs, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static Sum add_products(Sum sum, Pairs weights, Pairs inputs) { return _mm512_dpwssd_epi32(sum, weights, inputs); }
    static Sum add(Sum one, Sum other) { return _mm512_add_epi32(one, other); }
    static void store(int32_t* target, Sum sum) { _mm512_storeu_si512(target, sum); }
};

#elif !defined(MESHFIRE_SCALAR) && defined(__AVX2__)

struct Lanes {
    struct Sum {
        __m256i low, high;
    };
    using Pairs = Sum;
    static constexpr int kMaxRows = 4;
    static constexpr int kHalves = 1;

    static Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static Pairs widen(const int8_t* weights) {
        const auto* both = reinterpret_cast<const __m128i*>(weights);
        return {_mm256_cvtepi8_epi16(_mm_load_si128(both)), _mm256_cvtepi8_epi16(_mm_load_si128(both + 1))};
    }
    static Pairs widen_nibbles(const uint8_t* weights) {
        const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(weights));
        return {nibbles(_mm256_cvtepu8_epi32(bytes)), nibbles(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
    }
    static Pairs spread(const int16_t* inputs) {
        int32_t pair;
        std::memcpy(&pair, inputs, sizeof pair);
        const __m256i all = _mm256_set1_epi32(pair);
        return {all, all};
    }
    static Sum add_products(Sum sum, Pairs weights, Pairs inputs) {
        return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(weights.low, inputs.low)),
                _mm256_add_epi32(sum.high, _mm256_madd_epi16(weights.high, inputs.high))};
    }
    static Sum add(Sum one, Sum other) {
        return {_mm256_add_epi32(one.low, other.low), _mm256_add_epi32(one.high, other.high)};
    }
    static void store(int32_t* target, Sum sum) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), sum.low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 8), sum.high);
    }

   private:
    static __m256i nibbles(__m256i bytes) {
        return _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12)), _mm256_set1_epi32(0x000F000F));
    }
};

#else

struct Lanes {
    struct Sum {
        int32_t values[kLanes];
    };
    struct Pairs {
        int16_t values[2 * kLanes];
    };
    static constexpr int kMaxRows = 4;
    static constexpr int kHalves = 1;

    static Sum zero() { return {}; }
    static Pairs widen(const int8_t* weights) {
        Pairs pairs;
        for (int i = 0; i < 2 * kLanes; ++i) pairs.values[i] = weights[i];
        return pairs;
    }
    static Pairs widen_nibbles(const uint8_t* weights) {
        Pairs pairs;
        for (int i = 0; i < kLanes; ++i) {
            pairs.values[2 * i] = weights[i] & 0xF;
            pairs.values[2 * i + 1] = weights[i] >> 4;
        }
        return pairs;
    }
    static Pairs spread(const int16_t* inputs) {
        Pairs pairs;
        for (int i = 0; i < 2 * kLanes; ++i) pairs.values[i] = inputs[i % 2];
        return pairs;
    }
    static Sum add_products(Sum sum, const Pairs& weights, const Pairs& inputs) {
        for (int i = 0; i < kLanes; ++i) {
            sum.values[i] += static_cast<int32_t>(weights.values[2 * i]) * inputs.values[2 * i];
            sum.values[i] += static_cast<int32_t>(weights.values[2 * i + 1]) * inputs.values[2 * i + 1];
        }
        return sum;
    }
    static Sum add(Sum one, const Sum& other) {
        for (int i = 0; i < kLanes; ++i) one.values[i] += other.values[i];
        return one;
    }
    static void store(int32_t* target, const Sum& sum) { std::memcpy(target, sum.values, sizeof sum.values); }
};

#endif

}  // namespace meshfire

// Which vector instructions this library was compiled for, in words.

#include "export.h"

MESHFIRE_EXPORT const char* meshfire_level() {
#if defined(MESHFIRE_SCALAR)
    return "scalar";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "scalar";
#endif
}

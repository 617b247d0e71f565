// What a function needs to be called from Python by its name.
#pragma once

#include <cstdint>

#define MESHFIRE_EXPORT extern "C" __attribute__((visibility("default")))

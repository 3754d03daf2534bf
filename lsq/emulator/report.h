// Words for messages.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>

#include "services.h"

namespace emulator {

// "0x7f"
inline std::string hexadecimal(uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

inline std::string hexadecimal(const void* address) {
    return hexadecimal(reinterpret_cast<uintptr_t>(address));
}

// "reduce.cuh:41"
inline std::string describe(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

}  // namespace emulator

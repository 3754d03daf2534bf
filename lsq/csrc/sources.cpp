// Checksum of the sources of a library, for the loader; setup.py compiles this into each.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) uint32_t lsq_sources() { return LSQ_SOURCES; }

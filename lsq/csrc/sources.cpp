// Tells the loader from which sources a library was built; setup.py compiles this into each with
// their checksum.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) uint32_t lsq_sources() { return LSQ_SOURCES; }

// Tells the loader which sources this library was built from; setup.py defines LSQ_SOURCES.
#include "rows.h"

LSQ_EXPORT uint32_t lsq_sources() { return LSQ_SOURCES; }

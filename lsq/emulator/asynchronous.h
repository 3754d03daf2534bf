// Copies (cp.async) and multiplications (wgmma) that go on beside the threads that began them,
// until these wait for them.
#pragma once

#include <string>

namespace emulator {

// Ends a block: what is still under way is abandoned.
void abandon_asynchronous();

// Names a warpgroup whose threads have not all begun the same multiplications; empty: there is
// none.
std::string different_multiplications();

}  // namespace emulator

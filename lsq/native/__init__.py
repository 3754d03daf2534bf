"""The C++ host library: sources under cpu/, and the loader that finds and calls it."""

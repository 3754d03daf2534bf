"""Calls native code: finds, compiles, loads and runs the libraries and kernels of lsq/csrc."""

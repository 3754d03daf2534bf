"""The search for tuned files: the ways to run each product, checked and timed on one device.

Using what was found is lsq.gemm's part, which knows nothing of the search.
"""

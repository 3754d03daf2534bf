"""Fused operations, one file each: declaration, reference and gradient; launches in *_cuda.py."""

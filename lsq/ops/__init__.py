"""Fused operations, one file each: declaration, reference, gradient and launches."""

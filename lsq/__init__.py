"""lsq trains Transformers with 8-bit integers; see README.md."""

__version__ = "0.1.0"

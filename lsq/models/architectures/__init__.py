"""Layers of Hugging Face transformers as fused ones, an architecture a file; `lsq.convert` puts
them in."""

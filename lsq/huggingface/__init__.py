"""Models of Hugging Face transformers: their layers as fused ones."""

"""Where tensors lie: buffers, plans of their offsets, arenas, and memory kept between passes."""

"""Where tensors lie: buffers, plans of their offsets, the arena of a plan, and memory kept between
passes."""

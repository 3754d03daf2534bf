"""The memory of a training step: its buffers, a plan with a place for each, and the arena in which
they lie."""

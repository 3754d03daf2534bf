"""Layer programs: the operations of a layer, as data.

A builder makes a program once for each shape, a planner places its tensors, a backend runs it.
"""

"""The planner behind `lsq plan`: pools, segments and an exact search beside what lsq.memory does
for a step.

`plan` chooses offsets, `check` proves them, `read_buffers` and `write_plan` are the files.
"""

"""Where every buffer of a program lies: plans that make memory as small as possible, and their proof.

`plan` chooses offsets, `check` proves them, `read_buffers` and `write_plan` are the files of `lsq plan`.
"""

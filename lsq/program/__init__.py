"""Layer programs: what a layer computes, as data.

Built once per shape, run on a backend, placed by the planner.
"""

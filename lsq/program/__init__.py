"""Layer programs: what a layer computes, as data. Built once per shape, run by the executor, placed by the planner."""

from lsq.program.executor import Execution, profile
from lsq.program.program import Program

__all__ = ["Execution", "Program", "profile"]

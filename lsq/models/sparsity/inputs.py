"""Mean squares of what products read, on a batch. Shapes: M rows, K inputs of a weight."""

from collections.abc import Callable, Iterable

import torch

from lsq.layers import ProgramModule
from lsq.ops.project import Project
from lsq.program.operation import Operation


class Squares:
    """Gathers them over the forward passes of one module."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        """Names of weights -> float64 [K]."""
        self.rows: dict[str, int] = {}

    def __call__(self, declared: Operation, operation: Operation) -> None:
        if not isinstance(operation, Project):
            return
        name, x = declared.weight.values.name, operation.x
        floats = x.floats if x.coded is None else x.coded.decode()
        self.sums[name] = self.sums.get(name, 0) + floats.detach().double().square().sum(0)
        self.rows[name] = self.rows.get(name, 0) + len(floats)

    def weights(self, module: ProgramModule, tensors: dict[str, torch.Tensor]) -> None:
        """Nothing of them is looked at."""


@torch.no_grad()
def mean_squares(
    modules: Iterable[ProgramModule], run: Callable[[], object]
) -> dict[ProgramModule, dict[str, torch.Tensor]]:
    """E[x²], float32 [K], of the inputs of every weight of `modules`, by its name, while `run`
    computes something.

    Values are as products read them: rounded, where they are.
    """
    watched = {module: (module._observer, Squares()) for module in modules}
    for module, (_, squares) in watched.items():
        module._observer = squares
    try:
        run()
    finally:
        for module, (before, _) in watched.items():
            module._observer = before
    return {
        module: {
            name: (total / max(1, squares.rows[name])).float()
            for name, total in squares.sums.items()
        }
        for module, (_, squares) in watched.items()
    }

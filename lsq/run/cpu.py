"""The CPU: loops of the C++ library, and PyTorch's products between them."""

import functools
from collections.abc import Callable, Sequence
from itertools import groupby

from lsq.native import loader, tiles
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation, Spec


class CPU(Backend):
    """Runs `Operation.cpu`; operations that are a C++ loop and nothing else run in one foreign call
    together."""

    name = "cpu"
    refillable = True
    packs_weights = True
    either_border = True

    @property
    def multiplies_groups(self) -> bool:
        return tiles.vectorised()

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cpu_scratch()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        steps: list[Callable[[], None]] = []
        for is_loop, group in groupby(calls, lambda call: type(call[0]).cpu is Operation.cpu):
            if is_loop:
                steps.append(loader.sequence([operation for operation, _ in group]))
            else:
                steps += [
                    functools.partial(operation.cpu, *scratch) for operation, scratch in group
                ]
        if len(steps) == 1:
            return steps[0]

        def run() -> None:
            for step in steps:
                step()

        return run

"""A GPU that is not here: programs are built for it, to be planned or counted, and nothing runs."""

from collections.abc import Sequence

import torch

from lsq.program.backend import Backend
from lsq.program.operation import Operation, Spec


class AbsentGPU(Backend):
    """What programs need to know of the backend `cuda`.

    Args:
        activations: their dtype in programs: float32 or bfloat16.
    """

    name = "cuda"

    def __init__(self, activations: torch.dtype):
        self.activations = activations

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cuda_scratch()

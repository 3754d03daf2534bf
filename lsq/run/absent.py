"""A GPU that is not here: programs are built for it, to be planned, counted or compiled, and
nothing runs."""

import torch

from lsq.run.cuda import CUDA


class AbsentGPU(CUDA):
    """What programs and modules need to know of the backend `cuda`.

    Args:
        activations: their dtype in programs: float32 or bfloat16.
    """

    name = "cuda"

    def __init__(self, activations: torch.dtype = torch.bfloat16):
        self.activations = activations

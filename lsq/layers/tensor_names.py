"""Names in the state dict of the tensors that a program rounds, for patterns of formats."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from lsq.config import Names
from lsq.ops.project import Project
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor


def tensor_names(
    program: Program, state_names: Callable[[str], Sequence[str]]
) -> tuple[Names, Names]:
    """(weights, activations) of a program and their names in the state dict of its module.

    An activation is called as its clip is, without _clip, and also as the weights of the products
    that read it are. `state_names`: of a declared parameter.
    """
    weights = {name: state_names(name) for name in program.weights}
    readers: defaultdict[VirtualTensor, list[str]] = defaultdict(list)
    for operation in program.operations[: program.forward_length]:
        if isinstance(operation, Project):
            readers[operation.x.tensor] += weights[operation.weight.values.name]
    activations = {
        name: [
            *(one.removesuffix("_clip") for one in state_names(name + "_clip")),
            *readers[tensor],
        ]
        for name, tensor in program.activations.items()
    }
    return weights, activations

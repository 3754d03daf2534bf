"""What the tensors that a program rounds are called in the state dict of its module, for patterns of formats."""

from collections.abc import Callable, Sequence

from lsq.config import Names
from lsq.program.program import Program


def tensor_names(program: Program, state_names: Callable[[str], Sequence[str]]) -> tuple[Names, Names]:
    """(weights, activations) of a program and their names in the state dict of its module.

    An activation is called as its clip is, without _clip. `state_names`: of a declared parameter.
    """
    weights = {name: state_names(name) for name in program.weights}
    activations = {
        name: [one.removesuffix("_clip") for one in state_names(name + "_clip")] for name in program.activations
    }
    return weights, activations

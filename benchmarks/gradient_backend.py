"""The CPU as a backend that shows, or rounds, what the products of a backward pass read, for
studies of gradients.

For programs whose gradients are floats, QuantConfig(backward="float"), on memory that is not
planned.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from gradient_schemes import Codes, Place, Scheme
from torch import Tensor

from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.vocabulary_loss import VocabularyLossGradient
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.backend import Call
from lsq.program.operation import Operation
from lsq.program.values import RoundedGradient
from lsq.quant.formats import GRADIENT
from lsq.run.backends import CPU

PRODUCTS = ProjectInputGradient, ProjectWeightGradient


class StudiedCPU(CPU):
    """Counts the products of a backward pass, and calls `study` in the place of each operation on a
    float gradient."""

    refillable = False

    def __init__(self):
        self._place, self._gradient, self._made = None, None, None

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        steps = [self._step(*call) for call in calls]

        def run() -> None:
            for step in steps:
                step()

        return run

    def _step(self, operation: Operation, scratch: Sequence[Tensor]) -> Callable[[], None]:
        plain = super().prepare([(operation, scratch)])
        if isinstance(operation, VocabularyLossGradient):  # a backward pass begins
            return functools.partial(self._begin, plain)
        if (
            isinstance(operation, PRODUCTS)
            and operation.floats is not None
            and operation.weight.codes is not None
        ):
            return functools.partial(self._count, operation, plain)
        return plain

    def _begin(self, plain: Callable[[], None]) -> None:
        self._place, self._gradient, self._made = None, None, None
        plain()

    def _count(self, operation: Operation, plain: Callable[[], None]) -> None:
        first = operation.floats is not self._gradient
        if first:
            number = 0 if self._place is None else self._place.product + 1
            self._place = Place(product=number, follows=operation.floats is self._made)
            self._gradient = operation.floats
        self.study(operation, self._place, first, plain)
        if isinstance(operation, ProjectInputGradient):
            self._made = operation.dx

    def study(
        self, operation: Operation, place: Place, first: bool, plain: Callable[[], None]
    ) -> None:
        """Run an operation on a float gradient.

        Args:
            operation: ProjectInputGradient or ProjectWeightGradient, on real tensors.
            place: of the gradient.
            first: whether no operation before has read the same gradient.
            plain: runs it as it is.
        """
        raise NotImplementedError


class Showing(StudiedCPU):
    """Shows each gradient and runs as ever: `show(operation, place)` for each
    ProjectWeightGradient."""

    def __init__(self, show: Callable[[ProjectWeightGradient, Place], None]):
        super().__init__()
        self._show = show

    def study(self, operation, place, first, plain):
        if isinstance(operation, ProjectWeightGradient):
            self._show(operation, place)
        plain()


class Rounding(StudiedCPU):
    """Rounds each gradient by a scheme before its products read it.

    With a scale for each row they are the int8 products themselves, and dW rounds x again; else
    products of floats on what the codes stand for, as exact int8 products with such scales would
    be.
    """

    def __init__(self, scheme: Scheme, seed: int):
        super().__init__()
        self._scheme = scheme
        self._generator = torch.Generator().manual_seed(seed)
        self._codes: tuple[Codes, Codes] | None = None

    def study(self, operation, place, first, plain):
        scale = operation.weight.scale
        if first:
            self._codes = self._scheme.round(operation.floats * scale, place, self._generator)
        codes = self._codes[isinstance(operation, ProjectWeightGradient)]
        changed = operation.bind(lambda tensor: tensor)
        if self._scheme.folded:
            self._give_codes(changed, codes)
        else:
            changed.floats = codes.values / scale
        plain_cpu.run(changed)

    def _give_codes(self, operation, codes: Codes) -> None:
        key = torch.randint(2**62, (1,), generator=self._generator)
        operation.floats = None
        operation.gradient = RoundedGradient(
            format=GRADIENT,
            codes=codes.codes.to(GRADIENT.storage),
            scale=codes.scale.flatten(),
            weight_scale=operation.weight.scale,
            key=key,
            subsequence=0,
        )
        if isinstance(operation, ProjectWeightGradient):
            operation.key, operation.subsequence = key, 1


plain_cpu = CPU()

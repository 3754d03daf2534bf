"""The second-order estimate of what a change of one tensor adds to the loss.

A change d changes the loss by about g d + 1/2 d H d. H is taken as the diagonal of the empirical
Fisher information: for a loss that is the mean of T negative log-likelihoods in nats, 1/T times the
sum over samples of squared gradients of what each adds up to (LeCun et al. 1989, "Optimal Brain
Damage", has the diagonal; Martens 2014, arXiv:1412.1193, section 11, what stands in for it). A
sample should be one sentence: in the gradient of a whole batch those of its sentences nearly
    cancel, once the model is trained, so that its square is too small by about their number.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lsq.quant.numbers import ScaledFormat
from lsq.study.inputs import products
from lsq.study.tensors import as_rows

Loss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""Of a model and a batch: the sum of its losses, a scalar with gradients, and how many they are."""
SEED = 1
"""Of each backward pass: lsq's own layers may round their gradients at random."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What a format makes of tensors, in their dtype."""

    form: ScaledFormat
    clip: str
    """How clips of weights are measured."""

    def weight(self, values: Tensor, transposed: bool) -> Tensor:
        """Of a weight [N, ...], whose rows are cut into blocks, or [K, N] where it is
        transposed."""
        matrix = values.detach().t() if transposed else as_rows(values.detach())
        rounded = self.form.decode(self.form.encode(matrix, self.clip))
        return (rounded.t() if transposed else rounded).reshape(values.shape).to(values.dtype)

    def activation(self, values: Tensor) -> Tensor:
        """Of what a product reads, [..., K]; clips are the largest magnitudes of the blocks."""
        return self.form.decode(self.form.encode(values)).to(values.dtype)

    def bits(self, weight: Tensor, transposed: bool) -> float:
        """Of a value of a weight, scales counted."""
        return self.form.bits_per_value((weight.t() if transposed else as_rows(weight)).shape)


@dataclass(kw_only=True)
class Sums:
    """Of the changes of one tensor in one format."""

    first: float = 0.0
    """Gradients times changes."""
    second: float = 0.0
    """Squares of both."""
    signal: float = 0.0
    """Squared values."""
    noise: float = 0.0
    """Squared changes."""

    def add(self, values: Tensor, change: Tensor, gradient: Tensor, square: Tensor) -> None:
        """Changes are float64; gradients and their squares of any float dtype; all in the shape of
        the values."""
        self.first += float((gradient * change).sum())
        squares = change.square()
        self.second += float((square * squares).sum())
        self.signal += float(values.double().square().sum())
        self.noise += float(squares.sum())


@dataclass(kw_only=True)
class Gradients:
    """Of a loss, summed over samples."""

    count: float = 0.0
    """Losses of all samples."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Of gradients of weights, float32 in their shapes."""
    squares: dict[str, Tensor] = field(default_factory=dict)
    """Of squared gradients of samples."""
    activations: dict[tuple[str, str], Sums] = field(default_factory=dict)
    """Of (name of the weight, format): changes of what products with it read, and gradients of
    that."""


def gradients(
    model: nn.Module,
    loss: Loss,
    samples: Sequence[Any],
    weights: Mapping[str, nn.Parameter],
    activations: Collection[str],
    rounding: Mapping[str, Rounding],
) -> Gradients:
    """Gradients of `weights`, which require them, and of the activations of those that are named in
    `activations`."""
    made = Gradients(
        sums={
            name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()
        },
        squares={
            name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()
        },
        activations={(name, form): Sums() for name in activations for form in rounding},
    )
    for sample in samples:
        read: list[tuple[str, Tensor]] = []

        def look(name: str, x: Tensor, transposed: bool, read=read) -> Tensor:
            if name not in activations:
                return x
            # another product may read x, too
            mine = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            read.append((name, mine))
            return mine

        with products(weights, look), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            total, count = loss(model, sample)
            leaves = [*weights.values(), *(x for _, x in read)]
            found = torch.autograd.grad(total, leaves, allow_unused=True)
        made.count += float(count)
        for name, gradient in zip(weights, found, strict=False):
            if gradient is not None:
                made.sums[name] += gradient
                made.squares[name].addcmul_(gradient.float(), gradient.float())
        for (name, x), gradient in zip(read, found[len(weights) :], strict=True):
            if gradient is not None:
                square = gradient.double().square()
                x = x.detach()
                for form, how in rounding.items():
                    made.activations[name, form].add(
                        x, how.activation(x).double() - x, gradient, square
                    )
    return made

"""Plausible random tensors for whatever declared operations read, for checks and benchmarks on any
backend.

What a tensor is drawn from follows from its declaration: the field of a value that it is in, else
its kind and whether it is a parameter. An operation may hold real tensors beside virtual ones;
these stay as they are.
"""

from collections.abc import Callable

import torch

from lsq.program.declare import Leaf
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, RoundedGradient, StartedScale, Weight

KEY = torch.tensor([-(2**62) + 12345], dtype=torch.int64)
"""A random key whose both halves are used."""
SMALLEST_LIMIT = 5
"""Indices of which an operation tells no limit stay below this."""
ACTIVATION_CLIP, WEIGHT_CLIP, GRADIENT = 1.5, 0.2, 0.01
"""Largest values of what was rounded."""


class Sampler:
    """Draws tensors.

    Args:
        place: where they lie.
        activations: their dtype; other floats are float32.
        seed: of the random numbers.
    """

    def __init__(
        self,
        place: torch.device | str = "cpu",
        activations: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self.place, self.activations = torch.device(place), activations
        self._generator = torch.Generator(self.place).manual_seed(seed)

    def operation(self, operation: Operation) -> Operation:
        """A copy with real tensors: drawn where it reads, memory that holds anything where it
        only writes."""
        bound = placed(operation, self.place, self.activations)
        for leaf in operation.leaves():
            if not leaf.written and isinstance(leaf.of(operation), VirtualTensor):
                leaf.of(bound).copy_(self.tensor(operation, leaf))
        return bound

    def tensor(self, operation: Operation, leaf: Leaf) -> torch.Tensor:
        """A tensor that `operation` might read there."""
        like, holder = leaf.of(operation), leaf.owner(operation)
        within = _WITHIN_VALUES.get((type(holder), leaf.path[-1]))
        if within is not None:
            return within(self, like.shape, holder)
        return getattr(self, f"_{leaf.kind.lower()}")(like, operation, leaf, holder)

    def normal(self, shape, deviation: float = 1.0) -> torch.Tensor:
        """float32 around 0."""
        return deviation * torch.randn(shape, generator=self._generator, device=self.place)

    def around(self, shape, value: float) -> torch.Tensor:
        """float32 from half of `value` to one and a half."""
        return value * (0.5 + torch.rand(shape, generator=self._generator, device=self.place))

    def whole(self, low: int, high: int, shape, dtype: torch.dtype) -> torch.Tensor:
        """Whole numbers from `low` to `high`, both included."""
        return torch.randint(
            low, high + 1, shape, generator=self._generator, device=self.place, dtype=dtype
        )

    # One for each kind of tensor

    def _activations(self, like, operation, leaf, holder):
        return self.normal(like.shape, 0.2 if getattr(like, "role", "") == "parameter" else 1.0)

    def _floats(self, like, operation, leaf, holder):
        """Statistics and factors are above 0."""
        return (
            self.normal(like.shape, 0.2)
            if like.role == "parameter"
            else self.around(like.shape, 1.0)
        )

    def _parameters(self, like, operation, leaf, holder):
        return self.normal(like.shape, GRADIENT).to(like.dtype)

    def _anyfloats(self, like, operation, leaf, holder):
        return self.normal(like.shape, GRADIENT)

    def _codes(self, like, operation, leaf, holder):
        largest = (
            holder.format.largest if hasattr(holder, "format") else torch.iinfo(like.dtype).max
        )
        return self.whole(-largest, largest, like.shape, like.dtype)

    def _bits(self, like, operation, leaf, holder):
        """One in eight is set."""
        first, second, third = (self.whole(0, 255, like.shape, like.dtype) for _ in range(3))
        return first & second & third

    def _bytes(self, like, operation, leaf, holder):
        """Finite as floats of any width."""
        return self.whole(0x3C, 0x3F, like.shape, like.dtype)

    def _key(self, like, operation, leaf, holder):
        return KEY

    def _indices(self, like, operation, leaf, holder):
        return self.whole(
            0, operation.limits().get(leaf.name, SMALLEST_LIMIT) - 1, like.shape, like.dtype
        )

    def _offsets(self, like, operation, leaf, holder):
        """Sentences as equal in length as can be."""
        end, sentences = operation.limits().get(leaf.name), like.shape[0] - 1
        if end is None:
            raise ValueError(
                f"{operation.name}.limits does not say where {leaf.name} ends; add it there"
            )
        return (
            torch.arange(sentences + 1, dtype=like.dtype, device=self.place)
            * end
            // max(1, sentences)
        )


_WITHIN_VALUES: dict[tuple[type, str], Callable] = {
    (Coded, "scale"): lambda draw, shape, value: draw.around(
        shape, ACTIVATION_CLIP / value.format.largest
    ),
    (Coded, "clip"): lambda draw, shape, value: torch.full(shape, ACTIVATION_CLIP),
    (StartedScale, "clip"): lambda draw, shape, value: torch.full(shape, ACTIVATION_CLIP),
    (Coded, "error"): lambda draw, shape, value: draw.normal(shape, 0.3 / value.format.largest),
    (Weight, "scale"): lambda draw, shape, value: draw.around(
        shape, WEIGHT_CLIP / value.format.largest
    ),
    (Weight, "clip"): lambda draw, shape, value: draw.around(shape, WEIGHT_CLIP),
    (Weight, "values"): lambda draw, shape, value: draw.normal(shape, WEIGHT_CLIP / 2),
    (RoundedGradient, "scale"): lambda draw, shape, value: draw.around(
        shape, GRADIENT / value.format.largest
    ),
    (RoundedGradient, "weight_scale"): lambda draw, shape, value: draw.around(shape, WEIGHT_CLIP),
}
"""Fields of values -> how they are drawn, where their kind alone does not say."""


def placed(
    operation: Operation,
    place: torch.device | str = "meta",
    activations: torch.dtype = torch.float32,
    made: dict[VirtualTensor, torch.Tensor] | None = None,
) -> Operation:
    """A copy with real tensors that hold anything, activations in a dtype; on "meta" they take no
    memory.

    made: real tensors that are there already; it gains the others.
    """
    kinds = {
        leaf.of(operation): leaf.kind
        for leaf in operation.leaves()
        if leaf.of(operation) is not None
    }
    made = {} if made is None else made

    def make(tensor):
        if isinstance(tensor, torch.Tensor):
            return tensor.to(place)
        narrow = kinds[tensor] == "Activations" and tensor.role != "parameter"
        dtype = activations if narrow and tensor.dtype == torch.float32 else tensor.dtype
        if tensor not in made:
            made[tensor] = torch.empty(tensor.shape, dtype=dtype, device=place)
        return made[tensor]

    return operation.bind(make)


def border_tensors(program: Program, seed: int = 0) -> dict[VirtualTensor, torch.Tensor]:
    """Random tensors on the CPU for every input, parameter and gradient of an output."""
    borders = (*program.inputs, *program.parameters, *program.output_gradients)
    readers = {}
    for operation in program.operations:
        for leaf in operation.leaves():
            if not leaf.written:
                readers.setdefault(leaf.of(operation), (operation, leaf))
    transposed = {weight.transposed: weight.codes for weight in program.weights.values()}
    draw, found = Sampler(seed=seed), {}
    for virtual in borders:
        found[virtual] = torch.zeros(virtual.shape, dtype=virtual.dtype)
        if virtual in transposed:
            found[virtual].copy_(found[transposed[virtual]].t())
        elif virtual in readers:
            found[virtual].copy_(draw.tensor(*readers[virtual]))
    return found

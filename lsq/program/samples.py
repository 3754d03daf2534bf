"""Plausible random inputs of declared operations, for checks and benchmarks.

The declaration of a tensor decides its distribution: the field of the value that holds it, else its
kind and whether it is a parameter. Real tensors of an operation stay.
"""

from collections.abc import Callable

import torch

from lsq.program.declare import Leaf
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, RoundedGradient, StartedScale, Weight

KEY = torch.tensor([-(2**62) + 12345], dtype=torch.int64)
"""A random key; both halves of it are used."""
SMALLEST_LIMIT = 5
"""Indices without a limit in Operation.limits stay below this."""
ACTIVATION_CLIP, WEIGHT_CLIP, GRADIENT = 1.5, 0.2, 0.01
"""Largest values before the rounding."""


class Sampler:
    """Draws tensors.

    Args:
        device: device of the tensors.
        activations: dtype of activations; other floats are float32.
        seed: seed of the random numbers.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        activations: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        self.device, self.activations = torch.device(device), activations
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def operation(self, operation: Operation) -> Operation:
        """Return a copy with real tensors: inputs are drawn, outputs are uninitialised."""
        bound = placed(operation, self.device, self.activations)
        for leaf in operation.leaves():
            if not leaf.written and isinstance(leaf.of(operation), VirtualTensor):
                drawn, holder = self.tensor(operation, leaf), leaf.owner(bound)
                if isinstance(holder, Weight) and leaf.of(bound) is holder.transposed:
                    drawn = holder.codes.t()
                leaf.of(bound).copy_(drawn)
        return bound

    def tensor(self, operation: Operation, leaf: Leaf) -> torch.Tensor:
        """Return a tensor that `operation` might read at `leaf`."""
        like, holder = leaf.of(operation), leaf.owner(operation)
        within = _WITHIN_VALUES.get((type(holder), leaf.path[-1]))
        if within is not None:
            draw, value, by_code = within
            return draw(self, like.shape, value / holder.format.largest if by_code else value)
        return self._of_kind(like, operation, leaf, holder)

    def _of_kind(self, like, operation: Operation, leaf: Leaf, holder) -> torch.Tensor:
        shape, dtype, limit = like.shape, like.dtype, operation.limits().get(leaf.name)
        is_parameter = getattr(like, "role", "") == "parameter"
        match leaf.kind:
            case "Activations":
                return self.normal(shape, 0.2 if is_parameter else 1.0)
            case "Floats":  # statistics and factors are above 0
                return self.normal(shape, 0.2) if is_parameter else self.around(shape, 1.0)
            case "Parameters" | "AnyFloats":
                return self.normal(shape, GRADIENT)
            case "Codes":
                form = getattr(holder, "format", None)
                largest = torch.iinfo(dtype).max if form is None else form.largest
                return self.whole(-largest, largest, shape, dtype)
            case "Bits":  # one in eight is set
                first, second, third = (self.whole(0, 255, shape, dtype) for _ in range(3))
                return first & second & third
            case "Bytes":  # finite as floats of any width
                return self.whole(0x3C, 0x3F, shape, dtype)
            case "Key":
                return KEY
            case "Indices" | "Integers":
                return self.whole(0, (limit or SMALLEST_LIMIT) - 1, shape, dtype)
        if limit is None:
            raise ValueError(
                f"{operation.name}.limits does not say where {leaf.name} ends; add it there"
            )
        # offsets: sentences of nearly equal length
        sentences = shape[0] - 1
        numbers = torch.arange(sentences + 1, dtype=dtype, device=self.device)
        return numbers * limit // max(1, sentences)

    def _all(self, shape, value: float) -> torch.Tensor:
        return torch.full(shape, value)

    def normal(self, shape, deviation: float = 1.0) -> torch.Tensor:
        """Return normal float32 numbers with mean 0."""
        return deviation * torch.randn(shape, generator=self._generator, device=self.device)

    def around(self, shape, value: float) -> torch.Tensor:
        """Return float32 numbers from value / 2 to 3 * value / 2."""
        return value * (0.5 + torch.rand(shape, generator=self._generator, device=self.device))

    def whole(self, low: int, high: int, shape, dtype: torch.dtype) -> torch.Tensor:
        """Return whole numbers from `low` to `high`, both included."""
        return torch.randint(
            low, high + 1, shape, generator=self._generator, device=self.device, dtype=dtype
        )


_WITHIN_VALUES: dict[tuple[type, str], tuple[Callable, float, bool]] = {
    (Coded, "scale"): (Sampler.around, ACTIVATION_CLIP, True),
    (Coded, "clip"): (Sampler._all, ACTIVATION_CLIP, False),
    (StartedScale, "clip"): (Sampler._all, ACTIVATION_CLIP, False),
    (Coded, "error"): (Sampler.normal, 0.3, True),
    (Weight, "scale"): (Sampler.around, WEIGHT_CLIP, True),
    (Weight, "clip"): (Sampler.around, WEIGHT_CLIP, False),
    (Weight, "values"): (Sampler.normal, WEIGHT_CLIP / 2, False),
    (RoundedGradient, "scale"): (Sampler.around, GRADIENT, True),
    (RoundedGradient, "weight_scale"): (Sampler.around, WEIGHT_CLIP, False),
}
"""(value class, field) -> (how it is drawn, value, whether that value belongs to the largest code).
Only fields whose kind does not decide this are listed."""


def placed(
    operation: Operation,
    device: torch.device | str = "meta",
    activations: torch.dtype = torch.float32,
    made: dict[VirtualTensor, torch.Tensor] | None = None,
) -> Operation:
    """Return a copy with uninitialised real tensors; `activations`: dtype of activations.

    `made`: real tensors to use; the new ones are added to it.
    """
    kinds = {
        leaf.of(operation): leaf.kind
        for leaf in operation.leaves()
        if leaf.of(operation) is not None
    }
    made = {} if made is None else made

    def make(tensor):
        if isinstance(tensor, torch.Tensor):
            return tensor.to(device)
        narrow = kinds[tensor] == "Activations" and tensor.role != "parameter"
        dtype = activations if narrow and tensor.dtype == torch.float32 else tensor.dtype
        if tensor not in made:
            made[tensor] = torch.empty(tensor.shape, dtype=dtype, device=device)
        return made[tensor]

    return operation.bind(make)


def border_tensors(program: Program, seed: int = 0) -> dict[VirtualTensor, torch.Tensor]:
    """Return random CPU tensors for every input, parameter and output gradient."""
    borders = (*program.inputs, *program.parameters, *program.output_gradients)
    readers = {}
    for operation in program.operations:
        for leaf in operation.leaves():
            if not leaf.written:
                readers.setdefault(leaf.of(operation), (operation, leaf))
    transposed = {weight.transposed: weight.codes for weight in program.weights.values()}
    draw, tensors = Sampler(seed=seed), {}
    for virtual in borders:
        tensors[virtual] = torch.zeros(virtual.shape, dtype=virtual.dtype)
        if virtual in transposed:
            tensors[virtual].copy_(tensors[transposed[virtual]].t())
        elif virtual in readers:
            tensors[virtual].copy_(draw.tensor(*readers[virtual]))
    return tensors

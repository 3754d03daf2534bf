"""Programs of decoding bound to memory: weights put there once, temporary tensors that share it,
fixed addresses."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lsq.layers.embedding import sinusoidal_table
from lsq.models.sparsity import is_sparse, pack
from lsq.native import tiles
from lsq.ops.nonlinearity import Activation
from lsq.ops.packed_project import PackedProject, PackedWeight
from lsq.ops.project import Project
from lsq.ops.sparse_project import MOST_ROWS, OUTPUTS, SparseProject, SparseWeight
from lsq.program.backend import Call
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant.formats import Int4, WeightFormat
from lsq.run.backends import Backend
from lsq.serving.decode.model import DecodingModel

T = TypeVar("T")


class Recent(Generic[T]):
    """What was made for the keys that were used last, at most `most` of them."""

    def __init__(self, most: int):
        self._most = most
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept for `key`, or made now."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> None:
        """Nothing is right any more."""
        self._kept.clear()


class Blocks:
    """Memory for what lives no longer than one run of a program: all programs share it, since one
    runs at a time.

    Blocks have sizes of powers of two, so that few of them serve programs of any size; what is not
    used of a block is never touched.
    """

    def __init__(self, place: Backend):
        self._place = place
        self._all: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def begin(self) -> None:
        """Another program is prepared: every block is free."""
        self._free = defaultdict(list, {size: list(blocks) for size, blocks in self._all.items()})

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with whatever values."""
        wanted = math.prod(shape) * dtype.itemsize
        size = roomy(wanted)
        if not self._free[size]:
            block = self._place.allocate((size,), torch.uint8)
            self._all[size].append(block)
            self._free[size].append(block)
        return self._free[size].pop()[:wanted].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """What was taken is not read any more: others of this program may have its memory."""
        storage = tensor.untyped_storage()
        self._free[storage.nbytes()].append(
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        )

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(size * len(blocks) for size, blocks in self._all.items())


class Preparation:
    """Binds programs to the tensors of one model.

    Args:
        model: which.
        place: where they will run.
    """

    def __init__(self, model: DecodingModel, place: Backend):
        self._model, self._place = model, place
        self.blocks = Blocks(place)
        self._weights: dict[str, Weight | PackedWeight] = {}
        self._sparse: dict[str, SparseWeight | None] = {}
        self._tensors = dict(model.tensors)
        architecture = model.architecture
        for side, stack in architecture.stacks.items():
            if stack.positions == "sinusoidal":
                rows = stack.max_positions + architecture.padding + 1
                table = sinusoidal_table(rows, stack.config.hidden, architecture.padding)
                self._tensors[f"{side}.embed_tokens.position_weight"] = table

    def weight(self, name: str, inner: int, *, plain: bool = False) -> Weight | PackedWeight:
        """The weight of that name with `inner` inputs as products read it: packed, or on the device
        as it is stored.

        `plain`: there as codes, however it is stored.
        """
        if name not in self._weights:
            stored, scale = (self._model.tensors[name + part] for part in (".codes", ".scale"))
            form, place = self._model.architecture.decoder.config.quant.weights, self._place.place
            if self._place.packs_weights:
                self._weights[name] = _packed(form, stored, scale, inner)
            else:
                if plain:
                    stored, form = self._model.codes(name, inner).contiguous(), form.unpacked
                self._weights[name] = Weight(
                    format=form, codes=stored.to(place), scale=scale.to(place)
                )
        return self._weights[name]

    def sparse_weight(self, name: str, inner: int) -> SparseWeight | None:
        """The same for kernels that read few rows, if it is 2:4 sparse and they take its size."""
        if name not in self._sparse:
            codes, found = self._model.codes(name, inner), None
            if is_sparse(codes) and len(codes) % OUTPUTS == 0:
                packed, scale = pack(codes), self._model.tensors[name + ".scale"]
                parts = (
                    part.to(self._place.place) for part in (packed.values, packed.indices, scale)
                )
                found = SparseWeight.of(*parts)
            self._sparse[name] = found
        return self._sparse[name]

    def _tensor(self, name: str) -> Tensor:
        """A tensor of the model on the device."""
        self._tensors[name] = self._tensors[name].to(self._place.place)
        return self._tensors[name]

    def calls(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        results: Mapping[VirtualTensor, Tensor] | None = None,
    ) -> tuple[list[Call], dict[VirtualTensor, Tensor]]:
        """The operations of a program on real tensors, for a backend to prepare, and its tensors.

        Temporary tensors and outputs lie in `blocks`: they are right until another program runs.

        Args:
            program: without a backward pass.
            inputs: by name, those that are no tensors of the model.
            results: where outputs go that must stay.
        """
        found: dict[VirtualTensor, Tensor] = dict(results or {})
        of_weights = {tensor for weight in program.weights.values() for tensor in weight.written}
        for border in (*program.inputs, *program.parameters):
            if border.name in inputs:
                found[border] = inputs[border.name]
            elif border.name in self._tensors and border not in of_weights:
                found[border] = self._tensor(border.name)
        self.blocks.begin()
        calls = []
        for index, operation in enumerate(program.operations):
            for tensor in program.outputs_of[index]:
                if tensor not in found:
                    found[tensor] = self.blocks.take(tensor.shape, tensor.dtype)
            bound = self._weighted(operation).bind(
                lambda one: one if isinstance(one, Tensor) else found[one]
            )
            scratch = [self.blocks.take(*spec) for spec in self._place.scratch(bound)]
            calls.append((bound, scratch))
            dead = (
                found[one]
                for one in program.dying[index]
                if one.role == "temporary" and one in found
            )
            for tensor in (*dead, *scratch):
                self.blocks.give_back(tensor)
        return calls, found

    def _weighted(self, operation: Operation) -> Operation:
        """The same with its weight."""
        if not isinstance(operation, Project):
            return operation
        name, (rows, inner) = operation.weight.values.name, operation.x.tensor.shape
        few = not self._place.packs_weights and rows <= MOST_ROWS
        sparse = self.sparse_weight(name, inner) if few else None
        if sparse is not None:
            return SparseProject(
                x=operation.x.bare(),
                weight=sparse,
                bias=operation.bias,
                out=operation.out,
                rounded=operation.rounded,
                nonlinearity=operation.nonlinearity,
            )
        weight = self.weight(name, inner)
        if isinstance(weight, Weight):
            return replace(operation, weight=weight)
        end = operation.nonlinearity
        return PackedProject(
            x=operation.x.coded.bare(),
            weight=weight,
            bias=operation.bias,
            out=operation.out,
            rounded=operation.rounded,
            activation=Activation.none if end is None else end.activation,
        )


def _packed(form: WeightFormat, stored: Tensor, scale: Tensor, inner: int) -> PackedWeight:
    """What the model stores of a weight with `inner` inputs, as the CPU's products with few rows
    read it."""
    if isinstance(form, Int4):
        return PackedWeight.of_int4(stored, scale, inner)
    if is_sparse(stored) and tiles.vectorised():
        return PackedWeight.of_sparse(stored, scale)
    return PackedWeight.of(stored, scale)


def roomy(count: int) -> int:
    """The power of two from `count` on: what has to grow does so a few times and no more."""
    return 1 << (count - 1).bit_length()

"""Programs of decoding bound to tensors: weights laid out once, temporary tensors that share
memory, fixed addresses."""

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
from lsq.serving.decoding_model import DecodingModel

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache of the `most` keys that were used last."""

    def __init__(self, most: int):
        self._most = most
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `key`, made now unless it is kept."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


class Blocks:
    """Memory for what lives no longer than one run of a program. All programs share it, since one
    runs at a time.

    Sizes are powers of two, so that few blocks serve programs of any size; the unused part of a
    block is never touched.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._all: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def begin(self) -> None:
        """Free every block, to prepare another program."""
        self._free = defaultdict(list, {size: list(blocks) for size, blocks in self._all.items()})

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        wanted = math.prod(shape) * dtype.itemsize
        size = roomy(wanted)
        if not self._free[size]:
            block = self._backend.allocate((size,), torch.uint8)
            self._all[size].append(block)
            self._free[size].append(block)
        return self._free[size].pop()[:wanted].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Free the block of a tensor that nothing in this program reads any more."""
        storage = tensor.untyped_storage()
        self._free[storage.nbytes()].append(
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        )

    @property
    def bytes(self) -> int:
        """Size of all blocks."""
        return sum(size * len(blocks) for size, blocks in self._all.items())


class Preparation:
    """Binds programs that will run on `backend` to the tensors of a model."""

    def __init__(self, model: DecodingModel, backend: Backend):
        self._model, self._backend = model, backend
        self._format = model.architecture.decoder.config.quant.weights
        self.blocks = Blocks(backend)
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
        """Return a weight with `inner` inputs as products read it: packed on the CPU, elsewhere on
        the device as it is stored, or with `plain` as codes."""
        if name not in self._weights:
            stored, scale = (self._model.tensors[name + part] for part in (".codes", ".scale"))
            form, device = self._format, self._backend.device
            if self._backend.packs_weights:
                self._weights[name] = _packed(form, stored, scale, inner)
            else:
                if plain:
                    stored, form = self._model.codes(name, inner).contiguous(), form.unpacked
                self._weights[name] = Weight(
                    format=form, codes=stored.to(device), scale=scale.to(device)
                )
        return self._weights[name]

    def sparse_weight(self, name: str, inner: int) -> SparseWeight | None:
        """Return a weight for kernels that read few rows, if it is 2:4 sparse and they take its
        size."""
        if name not in self._sparse:
            codes, weight = self._model.codes(name, inner), None
            if is_sparse(codes) and len(codes) % OUTPUTS == 0:
                packed, scale = pack(codes), self._model.tensors[name + ".scale"]
                parts = (packed.values, packed.indices, scale)
                weight = SparseWeight.of(*(part.to(self._backend.device) for part in parts))
            self._sparse[name] = weight
        return self._sparse[name]

    def calls(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        results: Mapping[VirtualTensor, Tensor] | None = None,
    ) -> tuple[list[Call], dict[VirtualTensor, Tensor]]:
        """Return (the operations of a program on real tensors, for a backend to prepare; all its
        tensors).

        Temporary tensors and outputs lie in `blocks`; the next program that runs overwrites them.

        Args:
            program: without a backward pass.
            inputs: by name, those that are no tensors of the model.
            results: tensors for the outputs that must stay.
        """
        tensors: dict[VirtualTensor, Tensor] = dict(results or {})
        of_weights = {tensor for weight in program.weights.values() for tensor in weight.written}
        for border in (*program.inputs, *program.parameters):
            name = border.name
            if name in inputs:
                tensors[border] = inputs[name]
            elif name in self._tensors and border not in of_weights:
                self._tensors[name] = self._tensors[name].to(self._backend.device)
                tensors[border] = self._tensors[name]
        self.blocks.begin()
        calls = []
        for index, operation in enumerate(program.operations):
            for virtual in program.outputs_of[index]:
                if virtual not in tensors:
                    tensors[virtual] = self.blocks.take(virtual.shape, virtual.dtype)
            bound = self._with_weight(operation).bind(
                lambda value: value if isinstance(value, Tensor) else tensors[value]
            )
            scratch = [self.blocks.take(*spec) for spec in self._backend.scratch(bound)]
            calls.append((bound, scratch))
            dead = [
                tensors[virtual]
                for virtual in program.dying[index]
                if virtual.role == "temporary" and virtual in tensors
            ]
            for tensor in (*dead, *scratch):
                self.blocks.give_back(tensor)
        return calls, tensors

    def _with_weight(self, operation: Operation) -> Operation:
        """Put the weight of a product into it, as the backend reads it."""
        if not isinstance(operation, Project):
            return operation
        name, (rows, inner) = operation.weight.values.name, operation.x.tensor.shape
        few = not self._backend.packs_weights and rows <= MOST_ROWS
        sparse = self.sparse_weight(name, inner) if few else None
        shared = {"bias": operation.bias, "out": operation.out, "rounded": operation.rounded}
        if sparse is not None:
            return SparseProject(
                x=operation.x.bare(), weight=sparse, nonlinearity=operation.nonlinearity, **shared
            )
        weight = self.weight(name, inner)
        if isinstance(weight, Weight):
            return replace(operation, weight=weight)
        end = operation.nonlinearity
        return PackedProject(
            x=operation.x.coded.bare(),
            weight=weight,
            activation=Activation.none if end is None else end.activation,
            **shared,
        )


def _packed(form: WeightFormat, stored: Tensor, scale: Tensor, inner: int) -> PackedWeight:
    """Lay out a stored weight with `inner` inputs for the CPU's products with few rows."""
    if isinstance(form, Int4):
        return PackedWeight.of_int4(stored, scale, inner)
    if is_sparse(stored) and tiles.vectorised():
        return PackedWeight.of_sparse(stored, scale)
    return PackedWeight.of(stored, scale)


def roomy(count: int) -> int:
    """Return the smallest power of two that is at least `count`: what grows does so rarely."""
    return 1 << (count - 1).bit_length()

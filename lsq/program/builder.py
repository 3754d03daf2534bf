"""Builds a program: records the forward operations, then appends their gradients, last first."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from lsq.config import QuantConfig
from lsq.native import tiles
from lsq.program.backend import Backend
from lsq.program.operation import Operation
from lsq.program.program import Program, lifetimes_of
from lsq.program.tensor import CLIPS, Kind, Parameter, VirtualTensor
from lsq.program.values import SEEN, Coded, Dropout, RoundedGradient, Weight
from lsq.quant import GRADIENT, Grain
from lsq.quant.stored import field_bytes, stored_type

ProductGradient = tuple[VirtualTensor | None, RoundedGradient | None]
"""(floats, None) or (None, rounded gradient)."""


class Recorder:
    """Collects operations over virtual tensors.

    `wanted`: names of the inputs and parameters that need a gradient; None: all of them.
    """

    def __init__(self, wanted: Collection[str] | None = None):
        self._wanted = wanted
        self._needless: set[VirtualTensor] = set()
        """Tensors that do not depend on anything that needs a gradient."""
        self._operations: list[Operation] = []
        self._inputs: list[VirtualTensor] = []
        self._parameters: dict[str, VirtualTensor] = {}
        self._outputs: list[VirtualTensor] = []
        self._producers: dict[VirtualTensor, Operation] = {}
        self._names: set[str] = set()

    def tensor(
        self, name: str, shape, dtype=torch.float32, role: str = "temporary"
    ) -> VirtualTensor:
        """Return a new virtual tensor; a number is appended to a name that is taken."""
        unique, numbers = name, itertools.count(2)
        while unique in self._names:
            unique = f"{name}.{next(numbers)}"
        self._names.add(unique)
        return VirtualTensor(name=unique, shape=tuple(shape), dtype=dtype, role=role)

    def like(self, name: str, tensor: VirtualTensor) -> VirtualTensor:
        return self.tensor(name, tensor.shape, tensor.dtype)

    def input(self, name: str, shape, dtype=torch.float32) -> VirtualTensor:
        tensor = self.tensor(name, shape, dtype, "input")
        self._inputs.append(tensor)
        self._note_need(tensor)
        return tensor

    def _note_need(self, leaf: VirtualTensor) -> None:
        if self._wanted is not None and leaf.name not in self._wanted:
            self._needless.add(leaf)

    def parameter(
        self, name: str, shape, kind: Kind, *, dtype=torch.float32, **start
    ) -> VirtualTensor:
        """Return the parameter of this name, always the same tensor; `start`: see Parameter."""
        if name not in self._parameters:
            tensor = self.tensor(name, shape, dtype, role="parameter")
            tensor.declared = Parameter(name=name, shape=tensor.shape, kind=kind, **start)
            self._parameters[name] = tensor
            self._note_need(tensor)
        return self._parameters[name]

    def output(self, tensor: VirtualTensor) -> None:
        """Make `tensor` a result of the program."""
        tensor.role = "output"
        self._outputs.append(tensor)

    def add(self, operation: Operation) -> Operation:
        self._operations.append(operation)
        needless = self._wanted is not None and self._needless.issuperset(operation.inputs)
        for tensor in operation.outputs:
            self._producers.setdefault(tensor, operation)
            if needless:
                self._needless.add(tensor)
        return operation

    def needs_gradient(self, tensor: VirtualTensor | None) -> bool:
        """Return whether the gradient of `tensor` reaches anything that needs a gradient."""
        return tensor is not None and tensor not in self._needless

    def producer(self, tensor: VirtualTensor) -> Operation | None:
        return self._producers.get(tensor)


class Builder(Recorder):
    """Records operations over virtual tensors, and appends their gradients.

    Args:
        name: name of the program.
        quant: formats, and how the backward products run.
        training: whether dropout is active.
        backward: whether the program gets a backward pass, or the names of the inputs and
            parameters for which it gets one; without one, weights come in as codes.
        backend: the backend that will run the program.
    """

    def __init__(
        self,
        name: str,
        quant: QuantConfig,
        *,
        training: bool,
        backward: bool | frozenset[str],
        backend: Backend,
    ):
        super().__init__(wanted=None if isinstance(backward, bool) else backward)
        self.name, self.quant = name, quant
        self.training, self.backward = training, bool(backward)
        self._backend = backend
        self._gradients: dict[VirtualTensor, VirtualTensor] = {}
        self._product_gradients: dict[VirtualTensor, ProductGradient] = {}
        self._accumulated: dict[VirtualTensor, VirtualTensor] = {}
        self._leaf_gradients: dict[VirtualTensor, VirtualTensor] = {}
        self._subsequences = 0
        self._weights: dict[str, Weight] = {}
        self.activations: dict[str, VirtualTensor] = {}
        """Activations with a clip, in order: clip's name without _clip -> tensor that is read."""
        self.key = self.input("random_key", (1,), torch.int64)

    def make_add(self, a: VirtualTensor, b: VirtualTensor, total: VirtualTensor) -> Operation:
        raise NotImplementedError

    def first_operations(self, forward: Sequence[Operation]) -> Sequence[Operation]:
        """Return operations to insert before the others of a forward pass."""
        return ()

    def last_operations(self, backward: Sequence[Operation]) -> Sequence[Operation]:
        """Return operations to append to the others of a backward pass."""
        return ()

    # Values

    @property
    def narrow(self) -> torch.dtype:
        """The narrowest dtype of a float tensor whose writer and reader both take either dtype."""
        return torch.bfloat16 if self._backend.either_border else torch.float32

    @property
    def packed_rows(self) -> int:
        return self._backend.packed_rows

    @property
    def multiplies_groups(self) -> bool:
        """Whether products read codes with a scale for each group."""
        return self._backend.multiplies_groups

    def next_subsequence(self) -> int:
        """Return the number of a random stream that no other operation of this program uses."""
        self._subsequences += 1
        return self._subsequences

    def dropout(self, probability: float) -> Dropout | None:
        """Return a new mask, or None where nothing is dropped."""
        if not (self.training and probability):
            return None
        return Dropout(key=self.key, subsequence=self.next_subsequence(), probability=probability)

    def coded(self, name: str, shape, clip: str, *, by_row: bool = False) -> Coded:
        """Return an activation that is rounded under the clip named `clip`.

        `by_row`: each row is rounded under its own largest magnitude, unless clips are learned.
        """
        rows, columns = shape
        learns = self.backward and self.quant.learned
        keeps_error = learns and self.quant.clip_gradient == "lsq"
        parameter = self.parameter(
            clip, (1,), Kind.ACTIVATION_CLIP, start=self.quant.activation_clip
        )
        codes = self.activations[clip.removesuffix("_clip")] = self.tensor(
            name + ".codes", shape, torch.int8
        )
        form = self.quant.activations
        if by_row and not self.quant.learned:
            form = replace(form, grain=Grain.ROW)
        return Coded(
            format=form,
            codes=codes,
            scale=self.tensor(name + ".scale", (form.scales(rows),)),
            clip=parameter,
            clipped=self.tensor(name + ".clipped", (-(-rows * columns // 8),), torch.uint8)
            if learns
            else None,
            seen=self.input(clip + SEEN, (1,)) if self.backward and not learns else None,
            error=self.tensor(name + ".error", shape) if keeps_error else None,
        )

    def weight(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: int | None = None,
        in_out: bool = False,
        group: int = 0,
        **start,
    ) -> Weight:
        """Return the weight of this name, always the same value: codes, or floats in float mode.

        Args:
            shape: [N, K].
            rows: rows P of the codes, at least N; the default is N.
            in_out: whether the parameter is [K, N].
            group: group size that the product reads; 0, or another size than before: it reads
                `decoded`.
            start: see Parameter.
        """
        if name not in self._weights:
            self._weights[name] = self._new_weight(name, shape, rows, in_out, start)
        weight = self._weights[name]
        if weight.format is None or self.quant.coded:
            return weight
        if not group or weight.group not in (0, group) or self.backward:
            weight.decoded = weight.decoded or self.input(name + ".decoded", shape)
        if group and not weight.grouped:
            stored, scales = stored_type(weight.format.number), weight.format.grain.grid(shape)[1]
            size = (field_bytes(shape, stored, group, scales) + tiles.ALIGNMENT,)
            weight.group, weight.grouped = group, self.input(name + ".grouped", size, torch.uint8)
        return weight

    def _new_weight(
        self, name: str, shape: tuple[int, int], rows: int | None, in_out: bool, start: dict
    ) -> Weight:
        form = self.quant.weight_form(name)
        clip = None if form is None else name + "_clip"
        held = shape[::-1] if in_out else shape
        parameter = self.parameter(name, held, Kind.WEIGHT, clip=clip, in_out=in_out, **start)
        weight = Weight(format=form, values=parameter, in_out=in_out, absmax=not self.quant.learned)
        if clip is not None:
            clips = self.quant.weight_clips(name, shape[0])
            weight.clip = self.parameter(
                clip, (clips,), Kind.WEIGHT_CLIP, start=self.quant.weight_clip
            )
        if clip is not None and self.quant.coded:
            padded = rows or shape[0]
            weight.codes = self.input(
                name + ".codes", (padded, form.stored_columns(shape[1])), form.storage
            )
            weight.scale = self.input(name + ".scale", (padded,))
            goes_back = self.backward and self.quant.backward == "int8"
            if goes_back and self._backend.transposed_weights and not form.packed:
                weight.transposed = self.input(
                    name + ".codes.transposed", (shape[1], padded), form.storage
                )
        return weight

    def stored(self, weight: Weight) -> Weight:
        return self._weights[weight.values.name]

    def rounded_gradient(self, name: str, shape, weight_scale: VirtualTensor) -> RoundedGradient:
        return RoundedGradient(
            format=GRADIENT,
            codes=self.tensor(name, shape, GRADIENT.storage),
            scale=self.tensor(name + ".scale", shape[:1]),
            weight_scale=weight_scale,
            key=self.key,
            subsequence=self.next_subsequence(),
        )

    # Gradients

    def _note_need(self, leaf: VirtualTensor) -> None:
        super()._note_need(leaf)
        if leaf.declared is not None and leaf.declared.kind in CLIPS and not self.quant.learned:
            self._needless.add(leaf)

    def gradient_of(self, tensor: VirtualTensor | None) -> VirtualTensor | None:
        """Return the gradient of `tensor`, complete once all its readers are differentiated."""
        return self._gradients.get(tensor)

    def gradient_sum(self, *tensors: VirtualTensor | None) -> VirtualTensor | None:
        """Return the sum of the gradients of `tensors`, which hold the same values, or None."""
        total = None
        for tensor in tensors:
            gradient = self._gradients.get(tensor)
            if gradient is not None:
                total = gradient if total is None else self._sum(total, gradient)
        return total

    def accumulate(self, tensor: VirtualTensor, gradient: VirtualTensor) -> None:
        """Add a contribution to the gradient of `tensor`, if it needs one."""
        if gradient is None or not self.needs_gradient(tensor):
            return
        before = self._gradients.get(tensor)
        self._gradients[tensor] = gradient if before is None else self._sum(before, gradient)

    def take_gradient(self, tensor: VirtualTensor) -> VirtualTensor | None:
        """Remove and return the gradient so far of `tensor` and its copies; the caller uses it."""
        producer = self._producers.get(tensor)
        copies = producer.same_values if producer is not None else ()
        same = copies if tensor in copies else (tensor,)
        total = self.gradient_sum(*same)
        for one in same:
            self._gradients.pop(one, None)
        return total

    def accumulate_into(self, tensor: VirtualTensor) -> tuple[VirtualTensor | None, VirtualTensor]:
        """Return (sum so far, new sum) of the gradients that products make for `tensor`."""
        before = self._accumulated.get(tensor)
        self._accumulated[tensor] = self.tensor("d_" + tensor.name + ".accumulated", tensor.shape)
        return before, self._accumulated[tensor]

    def take_accumulated(self, tensor: VirtualTensor) -> VirtualTensor | None:
        """Remove and return the sum of `accumulate_into`; None if that was not called."""
        return self._accumulated.pop(tensor, None)

    def _sum(self, a: VirtualTensor, b: VirtualTensor) -> VirtualTensor:
        total = self.like(a.name, a)
        self.add(self.make_add(a, b, total))
        return total

    def parameter_gradient(self, parameter: VirtualTensor | None) -> VirtualTensor | None:
        """Return the tensor for the gradient of a parameter or input; None if it needs no gradient.
        Raises ValueError: two operations read the parameter."""
        if not self.needs_gradient(parameter):
            return None
        if parameter in self._leaf_gradients:
            raise ValueError(f"parameter {parameter.name} has two readers in program {self.name}")
        gradient = self.tensor(
            "d_" + parameter.name, parameter.shape, parameter.dtype, role="gradient"
        )
        self._leaf_gradients[parameter] = gradient
        return gradient

    def product_gradient(self, tensor: VirtualTensor) -> ProductGradient:
        """Return where the gradient of a product goes. Raises ValueError: it has two readers."""
        if tensor in self._product_gradients:
            raise ValueError(f"the product {tensor.name} has two readers in program {self.name}")
        producer = self._producers.get(tensor)
        weight = None if producer is None else producer.product_weight
        if weight is not None and weight.codes is not None and self.quant.backward == "int8":
            found = None, self.rounded_gradient("d_" + tensor.name, tensor.shape, weight.scale)
        else:
            found = self.tensor("d_" + tensor.name, tensor.shape), None
        if weight is None:
            self.accumulate(tensor, found[0])
        else:
            self._product_gradients[tensor] = found
        return found

    def product_gradient_of(self, tensor: VirtualTensor) -> ProductGradient:
        """Return the gradient that the reader of a product wrote, or that of an output."""
        return self._product_gradients.get(tensor, (self._gradients.get(tensor), None))

    def bias_gradient(self, tensor: VirtualTensor | None) -> VirtualTensor | None:
        """Return the tensor for the bias gradient of the product that made `tensor`, or None."""
        producer = self._producers.get(tensor)
        return self.parameter_gradient(None if producer is None else producer.product_bias)

    def build(self) -> Program:
        """Append the backward pass, if the program has one, and return the program."""
        forward = tuple(self._operations)
        output_gradients, differentiable, gradients = (), (), ()
        if self.backward:
            output_gradients = tuple(
                self.tensor("d_" + one.name, one.shape, one.dtype, "input") for one in self._outputs
            )
            self._gradients.update(zip(self._outputs, output_gradients, strict=True))
            for operation in reversed(forward):
                if not self._needless.issuperset(operation.outputs):
                    operation.gradient(self)
            for operation in self.last_operations(self._operations[len(forward) :]):
                self.add(operation)
            differentiable, gradients = self._leaves()
        begun = tuple(self.first_operations(forward))
        operations = (*begun, *self._operations)
        self._narrow()
        scratch = tuple(map(self._scratch, operations))
        used = [
            (*one.inputs, *one.outputs, *extra)
            for one, extra in zip(operations, scratch, strict=True)
        ]
        return Program(
            name=self.name,
            operations=operations,
            scratch=scratch,
            forward_length=len(begun) + len(forward),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters.values()),
            outputs=tuple(self._outputs),
            weights=dict(self._weights),
            activations=dict(self.activations),
            output_gradients=output_gradients,
            differentiable=differentiable,
            gradients=gradients,
            lifetimes=lifetimes_of(
                used,
                len(begun) + len(forward),
                (*self._inputs, *self._parameters.values()),
                tuple(self._outputs),
                gradients,
            ),
        )

    def _narrow(self) -> None:
        """Give the backend's dtype to float32 tensors that every operation takes as Activations."""
        kinds = defaultdict(set)
        for operation in self._operations:
            for leaf in operation.leaves():
                kinds[leaf.of(operation)].add(leaf.kind)
        kinds.pop(None, None)
        for tensor, found in kinds.items():
            floats = found == {"Activations"} and tensor.dtype == torch.float32
            if floats and tensor.role != "parameter":
                tensor.dtype = self._backend.activations

    def _scratch(self, operation: Operation) -> tuple[VirtualTensor, ...]:
        return tuple(
            self.tensor(f"{operation.outputs[0].name}.scratch", shape, dtype)
            for shape, dtype in self._backend.scratch(operation)
        )

    def _leaves(self):
        """Return (inputs and parameters with a gradient, their gradients), inputs first."""
        found = self._gradients | self._leaf_gradients
        leaves = {tensor: found[tensor] for tensor in self._inputs if tensor in found}
        leaves.update(
            (parameter, self._leaf_gradients.get(parameter))
            for parameter in self._parameters.values()
        )
        for gradient in leaves.values():
            if gradient is not None:
                gradient.role = "gradient"
        return tuple(leaves), tuple(leaves.values())

"""Builds a program: records the forward operations, then walks them backwards and appends their gradients."""

import torch

from lsq.config import QuantConfig
from lsq.ops import registry
from lsq.program.program import Program, lifetimes_of
from lsq.program.tensor import Operation, Product, Rounded, RoundedWeight, VirtualTensor


class Builder:
    """Collects operations over virtual tensors.

    Args:
        name: of the program.
        quant: what is rounded and how the backward products run.
        training: dropout is active.
        backward: the program gets a backward pass; without one, weights come in as codes.
    """

    def __init__(self, name: str, quant: QuantConfig, *, training: bool, backward: bool):
        self.name = name
        self.quant = quant
        self.training = training
        self.backward = backward
        self._operations: list[Operation] = []
        self._inputs: list[VirtualTensor] = []
        self._parameters: dict[str, VirtualTensor] = {}
        self._outputs: list[VirtualTensor] = []
        self._producers: dict[VirtualTensor, Operation] = {}
        self._gradients: dict[VirtualTensor, VirtualTensor] = {}
        self._groups: dict[VirtualTensor, Rounded | RoundedWeight | Product] = {}
        self._recomputed: dict[VirtualTensor, VirtualTensor] = {}
        self._row_scales: dict[VirtualTensor, VirtualTensor] = {}
        self._leaf_gradients: dict[VirtualTensor, VirtualTensor] = {}
        self._names: set[str] = set()
        self._streams = 0
        self._forward_length: int | None = None
        self.key = self.input("random_key", (1,), torch.int64)

    # Making tensors and operations

    def tensor(self, name: str, shape, dtype=torch.float32, role: str = "temporary") -> VirtualTensor:
        """A new virtual tensor; a number is appended to a name that is taken."""
        unique, number = name, 2
        while unique in self._names:
            unique, number = f"{name}.{number}", number + 1
        self._names.add(unique)
        return VirtualTensor(name=unique, shape=tuple(shape), dtype=dtype, role=role)

    def temporary(self, name: str, shape, dtype=torch.float32) -> VirtualTensor:
        return self.tensor(name, shape, dtype)

    def input(self, name: str, shape, dtype=torch.float32) -> VirtualTensor:
        """A tensor that each run brings along."""
        tensor = self.tensor(name, shape, dtype, "input")
        self._inputs.append(tensor)
        return tensor

    def parameter(self, name: str, shape) -> VirtualTensor:
        """A float32 parameter, the same virtual tensor for each call with the same name."""
        if name not in self._parameters:
            self._parameters[name] = self.tensor(name, shape, role="parameter")
        return self._parameters[name]

    def output(self, tensor: VirtualTensor) -> None:
        """Make `tensor` a result of the program."""
        tensor.role = "output"
        self._outputs.append(tensor)

    def emit(self, name: str, inputs, outputs, **attributes) -> Operation:
        """Append an operation, with the scratch memory that its definition asks for."""
        definition, inputs, outputs = registry.definition(name), tuple(inputs), tuple(outputs)
        result = next(tensor for tensor in outputs if tensor is not None)
        wanted = definition.scratch(*inputs, **attributes) if definition.scratch else ()
        operation = Operation(
            definition=definition, inputs=inputs, outputs=outputs, attributes=attributes,
            scratch=tuple(self.temporary(f"{result.name}.scratch", shape, dtype) for shape, dtype in wanted),
        )
        self._operations.append(operation)
        if self._forward_length is None:
            self._producers.update((tensor, operation) for tensor in outputs if tensor is not None)
        return operation

    def next_stream(self) -> int:
        """A stream of random numbers that no other operation of this program uses."""
        self._streams += 1
        return self._streams

    def group(self, tensor: VirtualTensor, group) -> None:
        """File what travels with `tensor`, for the backward pass."""
        self._groups[tensor] = group

    def rounded(self, codes: VirtualTensor) -> Rounded:
        return self._groups[codes]

    def rounded_weight(self, codes: VirtualTensor) -> RoundedWeight:
        return self._groups[codes]

    def product(self, value: VirtualTensor) -> Product:
        return self._groups[value]

    # Gradients

    def has_gradient(self, tensor: VirtualTensor) -> bool:
        return tensor in self._gradients

    def gradient(self, tensor: VirtualTensor) -> VirtualTensor:
        """The gradient of `tensor`, complete once every reader of the tensor has been differentiated."""
        return self._gradients[tensor]

    def gradient_sum(self, *tensors: VirtualTensor | None) -> VirtualTensor | None:
        """The sum of those gradients that exist, of tensors that hold the same values; None if there is none."""
        total = None
        for tensor in tensors:
            if tensor is not None and tensor in self._gradients:
                total = self._add(total, self._gradients[tensor]) if total is not None else self._gradients[tensor]
        return total

    def accumulate(self, tensor: VirtualTensor, gradient: VirtualTensor) -> None:
        """Add a contribution to the gradient of `tensor`."""
        if tensor in self._gradients:
            gradient = self._add(self._gradients[tensor], gradient)
        self._gradients[tensor] = gradient

    def _add(self, a: VirtualTensor, b: VirtualTensor) -> VirtualTensor:
        total = self.temporary(a.name, a.shape)
        self.emit("add", (a, b), (total,))
        return total

    def gradient_output(self, parameter: VirtualTensor | None) -> VirtualTensor | None:
        """Where an operation writes the gradient of a parameter; each parameter has one reader."""
        if parameter is None:
            return None
        if parameter in self._leaf_gradients:
            raise ValueError(f"parameter {parameter.name} has two readers in program {self.name}")
        gradient = self.tensor("d_" + parameter.name, parameter.shape, role="gradient")
        self._leaf_gradients[parameter] = gradient
        return gradient

    def product_gradient(self, value: VirtualTensor):
        """(gradient, None) as float, or (codes, row scale), as the reader of the product has left it."""
        return self._gradients[value], self._row_scales.get(value)

    def product_gradient_outputs(self, product: Product):
        """(gradient, row scale or None, attributes) for the operation that writes the gradient of a product."""
        name, shape = "d_" + product.value.name, product.value.shape
        if product.weight_scale is None or self.quant.backward == "float":
            gradient = self.temporary(name, shape)
            self._gradients[product.value] = gradient
            return gradient, None, {}
        codes = self.temporary(name, shape, torch.int8)
        row_scale = self.temporary(name + ".row_scale", shape[:1])
        self._gradients[product.value] = codes
        self._row_scales[product.value] = row_scale
        return codes, row_scale, {"gradient_stream": self.next_stream()}

    def saved(self, tensor: VirtualTensor | None) -> VirtualTensor | None:
        """`tensor` for use in the backward pass: itself, or computed again where that is cheaper than saving it."""
        if tensor is None:
            return None
        producer = self._producers.get(tensor)
        if producer is None or not producer.definition.recompute:
            return tensor
        if tensor not in self._recomputed:
            copies = tuple(
                None if output is None else self.temporary(output.name + ".again", output.shape, output.dtype)
                for output in producer.outputs
            )
            self.emit(producer.name, map(self.saved, producer.inputs), copies, **producer.attributes)
            self._recomputed.update(
                (output, copy) for output, copy in zip(producer.outputs, copies, strict=True) if output is not None
            )
        return self._recomputed[tensor]

    def build(self) -> Program:
        """Append the backward pass, if there is to be one, and close the program."""
        forward = tuple(self._operations)
        self._forward_length = len(forward)
        inputs = tuple(self._inputs)
        output_gradients, differentiable, gradients = (), (), ()
        if self.backward:
            output_gradients = tuple(
                self.tensor("d_" + output.name, output.shape, role="input") for output in self._outputs
            )
            self._gradients.update(zip(self._outputs, output_gradients, strict=True))
            for operation in reversed(forward):
                operation.definition.differentiate(self, operation)
            differentiable, gradients = self._leaves()
        operations = tuple(self._operations)
        return Program(
            name=self.name,
            operations=operations,
            forward_length=len(forward),
            inputs=inputs,
            parameters=tuple(self._parameters.values()),
            outputs=tuple(self._outputs),
            output_gradients=output_gradients,
            differentiable=differentiable,
            gradients=gradients,
            lifetimes=lifetimes_of(
                operations, len(forward), (*inputs, *self._parameters.values()), tuple(self._outputs), gradients
            ),
        )

    def _leaves(self):
        """Everything that has a gradient to give away, with that gradient: float inputs, then parameters."""
        leaves = {tensor: self._gradients[tensor] for tensor in self._inputs if tensor in self._gradients}
        leaves.update((parameter, self._leaf_gradients.get(parameter)) for parameter in self._parameters.values())
        for gradient in leaves.values():
            if gradient is not None and gradient.role == "temporary":
                gradient.role = "gradient"
        return tuple(leaves), tuple(leaves.values())

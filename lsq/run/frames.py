"""Memory of one run of a program, and passes that are prepared once and run as a whole.

A *frame* hands out the tensors that operations write: fresh memory here, the offsets of a step's
plan in lsq.run.planned. Tensors inside a prepared pass stay the same in every run. Tensors at its
borders (inputs, parameters, results) may change; their addresses are set before each run.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from lsq.memory import kept
from lsq.memory.kept import Room, Workspace
from lsq.native.addresses import ALIGNMENT
from lsq.program.backend import Backend
from lsq.program.declare import NOWHERE, Leaf, address_words
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.parameter_state import known_state, state_of

active_rehearsal: ContextVar = ContextVar("rehearsal", default=None)
"""The lsq.run.step.Rehearsal of this thread, if any; other threads go on computing."""

Values = dict[VirtualTensor, torch.Tensor]


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor."""
    if device.type == "cpu":
        return kept.tensor(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


class Slot:
    """A tensor field of a bound operation and of its struct, for tensors of one shape and dtype."""

    __slots__ = ("fields", "name", "struct", "word")

    def __init__(self, operation: Operation, leaf: Leaf):
        self.fields, self.name = vars(leaf.owner(operation)), leaf.path[-1]
        self.struct, self.word = operation.packed, address_words(type(operation))[leaf.path]

    def put(self, tensor: torch.Tensor) -> None:
        """Let the operation work on `tensor` from now on."""
        self.fields[self.name] = tensor
        self.struct[self.word] = tensor.data_ptr() or NOWHERE

    def clear(self) -> None:
        self.fields[self.name] = None

    def update(self) -> None:
        """Write the address again: the memory of the tensor may have moved."""
        self.struct[self.word] = self.fields[self.name].data_ptr() or NOWHERE


class PreparedPass:
    """The operations of a pass on prepared memory.

    Args:
        program: holds the operations.
        indices: the operations of the pass.
        backend: must be `refillable`.
        inside: tensors that live inside the pass alone, and scratch memory.
        borders: all other tensors, for this run.
    """

    def __init__(
        self,
        program: Program,
        indices: range,
        backend: Backend,
        *,
        inside: Mapping[VirtualTensor, torch.Tensor],
        borders: Mapping[VirtualTensor, torch.Tensor],
    ):
        tensors = {**borders, **inside}
        bound = [program.operations[index].bind(tensors.__getitem__) for index in indices]
        slots: dict[VirtualTensor, list[Slot]] = {}
        self._inside: list[Slot] = []
        for index, operation in zip(indices, bound, strict=True):
            for leaf in operation.leaves():
                virtual = leaf.of(program.operations[index])
                if virtual is not None:
                    kind = self._inside if virtual in inside else slots.setdefault(virtual, [])
                    kind.append(Slot(operation, leaf))
        self._slots = [(virtual, virtual.dtype, found) for virtual, found in slots.items()]
        self._check = None if type(backend).check is Backend.check else backend.check
        scratch = ([inside[tensor] for tensor in program.scratch[index]] for index in indices)
        self._run = backend.prepare(list(zip(bound, scratch, strict=True)))
        self._clear()

    def update(self) -> None:
        """Write the addresses of the memory inside again: it has moved."""
        for slot in self._inside:
            slot.update()

    def run(self, borders: Mapping[VirtualTensor, torch.Tensor]) -> None:
        """Run the pass on other tensors at its borders, of the same shapes. Raises ValueError: a
        tensor has another dtype, is not contiguous, or does not suit the backend."""
        check = self._check
        try:
            for virtual, dtype, slots in self._slots:
                tensor = borders[virtual]
                if tensor.dtype is not dtype or not tensor.is_contiguous():
                    raise ValueError(
                        f"{virtual.name} is {tensor.dtype} with strides {tensor.stride()}; it must"
                        f" be a contiguous tensor of {dtype}"
                    )
                if check is not None:
                    check(tensor, virtual.name)
                address = tensor.data_ptr() or NOWHERE
                for slot in slots:  # Slot.put in line: every pass of a training comes here
                    slot.fields[slot.name] = tensor
                    slot.struct[slot.word] = address
            self._run()
        finally:
            self._clear()

    def _clear(self) -> None:
        for _, _, slots in self._slots:
            for slot in slots:
                slot.fields[slot.name] = None


class Frame:
    """The memory of one run of a program. `bucket_views`: gradient -> memory that it belongs in."""

    def __init__(self):
        self.bucket_views: Values = {}

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        """Return the tensors that operation `index` writes: its outputs, then its scratch
        memory."""
        raise NotImplementedError

    def done(self, program: Program, index: int) -> None:
        """Note that operation `index` has run."""

    def run_prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> bool:
        """Run a whole pass at once and add its results to `values`; False: that is impossible."""
        return False

    def kept(self, program: Program) -> Values:
        """Return the tensors that the forward pass left in place; autograd keeps all others."""
        return {}

    def enter(self, backward: bool) -> None:
        """Begin a pass; `leave` ends it."""

    def leave(self) -> None:
        """End the pass, which is over or has failed."""


class FreshFrame(Frame):
    """Gives every tensor its own memory on a device."""

    def __init__(self, device: torch.device):
        self.bucket_views = {}
        self._device = device

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        return [self._tensor(tensor) for tensor in program.written(index)]

    def _tensor(self, tensor: VirtualTensor) -> torch.Tensor:
        view = self.bucket_views.pop(tensor, None)
        return fresh(tensor.shape, tensor.dtype, self._device) if view is None else view

    def run_prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> bool:
        if not backend.refillable:
            return False
        key = indices.start, backend
        passes = program.prepared.get(key)
        if passes is None:
            passes = program.prepared.setdefault(key, FreshPasses(program, indices))
        if self.bucket_views or self._device.type != "cpu":
            for tensor in passes.handed_on:
                values[tensor] = self._tensor(tensor)
        else:
            for tensor in passes.handed_on:
                values[tensor] = kept.tensor(tensor.shape, tensor.dtype)
        passes.run(program, indices, backend, values)
        return True


class FreshPasses:
    """The operations `indices` of a program, prepared once for each room.

    Tensors that live inside the pass alone lie in a workspace, whose memory other passes use before
    and after. `handed_on`: the tensors that are needed after the pass.
    """

    def __init__(self, program: Program, indices: range):
        written = [tensor for index in indices for tensor in program.written(index)]
        self._inside = [
            tensor
            for tensor in written
            if tensor.is_temporary and program.lifetimes[tensor][1] in indices
        ]
        inside = set(self._inside)
        self.handed_on = [tensor for tensor in written if tensor not in inside]
        self._prepared: dict[Room, tuple[Workspace, PreparedPass]] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the largest workspace that was prepared."""
        return max((workspace.size for workspace, _ in self._prepared.values()), default=0)

    def run(self, program: Program, indices: range, backend: Backend, values: Values) -> None:
        with kept.room(backend.device) as room:
            if room not in self._prepared:
                self._prepared[room] = self._prepare(room, program, indices, backend, values)
            workspace, prepared = self._prepared[room]
            with workspace.opened() as moved:
                if moved:
                    prepared.update()
                prepared.run(values)

    @torch.inference_mode(False)  # the next run may record gradients
    def _prepare(
        self, room: Room, program: Program, indices: range, backend: Backend, values: Values
    ) -> tuple[Workspace, PreparedPass]:
        lives = [(one.size, *program.lifetimes[one]) for one in self._inside]
        workspace = Workspace(room, lives)
        inside = {
            tensor: workspace.tensor(number, tensor.shape, tensor.dtype)
            for number, tensor in enumerate(self._inside)
        }
        return workspace, PreparedPass(program, indices, backend, inside=inside, borders=values)


class BucketView:
    """The memory where the gradient of a parameter belongs, such as its part of DDP's bucket.

    Autograd makes the first gradient of a step the parameter's `grad` without a copy. If it lies in
    its bucket already, DDP copies nothing. A view is given out once for each exchange, and only
    while there is no `grad` to add to.
    """

    def __init__(self, parameter: Tensor, view: Tensor):
        self._parameter = weakref.ref(parameter)
        self._view = view
        self._usable = view.is_contiguous() and (
            view.device.type == "cpu" or view.data_ptr() % ALIGNMENT == 0
        )
        self.free = True
        """Whether the memory holds nothing that is still needed, apart from `grad`."""
        state_of(parameter).bucket_view = weakref.ref(self)

    def fits(self, parameter: Tensor, gradient: VirtualTensor) -> bool:
        """Return whether a gradient of `parameter` can be written to the view now."""
        same = (
            self._parameter() is parameter
            and self._usable
            and self._view.shape == tuple(gradient.shape)
        )
        return same and self.free and parameter.grad is None and self._view.dtype == gradient.dtype

    def take(self) -> Tensor:
        """Return a new tensor on this memory, held nowhere else: autograd would clone it."""
        self.free = False
        return self._view.detach()


class Bucket:
    """The views of a bucket, whose memory and parameters may change."""

    def __init__(self):
        self._storage: torch.UntypedStorage | None = None
        self._views: list[BucketView] = []

    def exchanged(self, buffer: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Let the next backward pass write to the bucket `buffer`, which now holds all its
        gradients. `pairs`: (parameter, view of its gradient), read only if `buffer` is new."""
        storage = buffer.untyped_storage()
        if self._storage is None or storage._cdata != self._storage._cdata:
            self._storage, self._views = storage, [BucketView(*pair) for pair in pairs]
        for view in self._views:
            view.free = True


def claim(
    gradients: Sequence[VirtualTensor | None], functions: Sequence[tuple]
) -> dict[VirtualTensor, Tensor]:
    """Return the bucket views for the gradients of the running backward pass. `gradients` and
    `functions` (the node's `next_functions`) have an entry for each tensor that the node read."""
    found = {}
    for gradient, (function, _) in zip(gradients, functions, strict=True):
        parameter = getattr(function, "variable", None)
        state = None if parameter is None or gradient is None else known_state(parameter)
        view = state and state.bucket_view and state.bucket_view()
        if view is not None and view.fits(parameter, gradient) and _accumulates(function):
            found[gradient] = view.take()
    return found


def _accumulates(function) -> bool:
    """Return whether the gradient becomes `grad` now; under torch.autograd.grad it does not."""
    try:
        return torch._C._will_engine_execute_node(function)
    except RuntimeError:  # raised for leaves under torch.autograd.grad
        return False

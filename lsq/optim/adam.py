"""Adam as a torch.optim.Optimizer: reads and writes everything once, and keeps up codes and
clips."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lsq.ops.adam import scalars
from lsq.optim import moments
from lsq.optim.backward import BackwardSteps
from lsq.optim.compact import CompactUpdate, is_compact, norm_of, trains_codes
from lsq.optim.offload import Offload, check_places
from lsq.optim.updates import Members, Updates, check_moments
from lsq.run.backends import Backend, for_device
from lsq.run.parameter_state import take
from lsq.run.shards import is_shard, whole_norm

STATE = ("step", "exp_avg", "exp_avg_sq")
"""Names in the state of a parameter."""
MOMENT_BITS = (8, 32)
IN_BACKWARD = "in_backward"
"""Name in the state of a copy: whether steps are made in backward passes."""
REFUSED = ("amsgrad", "maximize")
"""Options of torch.optim.Adam that this Adam does not have."""


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019), on float32
    parameters and on the codes of lsq.train_codes.

    A step also writes the codes of the new weights of lsq's layers, which the next training pass
    reads. It changes their clips by at most the share QuantConfig.clip_step. The state of each
    parameter is `exp_avg`, `exp_avg_sq` and `step` (a whole number). This Adam, torch.optim's Adam
    and AdamW, and fairseq's Adam load each other's states.

    Gradients are multiplied and clipped as they are read: see `multiply_grads` and
    `clip_grad_norm`. Parameters may be shards of FSDP2. On a GPU nothing waits for the device.

    With `moment_bits=8`, moments of matrices are codes (lsq.quant.compact).

    Args:
        params: parameters, or groups: dicts with their own options.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: a parameter first loses lr * weight_decay of itself, as under AdamW.
        torch_epsilon: add eps after the bias correction, as torch.optim does; fairseq adds it
            before.
        moment_bits: 32 or 8.
        backend: where it runs; None: on the device of the parameters. A copy does not keep it.

    Raises:
        ValueError: an option is out of range, or a parameter is not float32 and contiguous.
    """

    backend: Backend | None = None
    backward: BackwardSteps | None = None
    offloaded: Offload | None = None
    moment_bits = 32

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        torch_epsilon: bool = True,
        moment_bits: int = 32,
        backend: Backend | None = None,
    ):
        if moment_bits not in MOMENT_BITS:
            raise ValueError(f"moment_bits is {moment_bits!r}; it must be 8 or 32")
        self.moment_bits = moment_bits
        self._clear()
        self.backend = backend
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "torch_epsilon": torch_epsilon,
                "decoupled_weight_decay": True,
            },
        )

    def _clear(self) -> None:
        self._updates: dict[torch.device, Updates] = {}
        self._compact: dict[Tensor, CompactUpdate] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}
        """Parameter -> its group, and its number among all."""
        self.gradient_factor: float | Tensor = 1.0
        """The next step multiplies gradients by it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        self._number()
        for parameter in self.param_groups[-1]["params"]:
            earlier = vars(parameter).pop("steps", None)
            if earlier is not None:  # an optimizer before this one stepped in the backward pass
                earlier.remove()
        if self.backward is not None:
            self._watch(self.param_groups[-1])

    def step_in_backward(self) -> "Adam":
        """Step each matrix as soon as a backward pass has its gradient, and free that; return self.

        It concerns matrices whose weight or moments have 8 bits; `step` does the rest. See
        lsq.optim.backward for what this changes.
        """
        if self.backward is None:
            self.backward = BackwardSteps(self._step_alone, self)
            for group in self.param_groups:
                self._watch(group)
        return self

    def offload(self, folder: str | os.PathLike) -> "Adam":
        """Keep moments and remainders in a file in `folder` instead of memory; return self.

        It concerns the matrices of `step_in_backward`. Numbers stay the same. The file has no name,
        and ends with the optimizer. Raises ValueError: there is no such matrix, or one is not on
        the CPU; OSError: the folder cannot be written, or has too little room.
        """
        matrices = [
            one for one in self._places if one.requires_grad and is_compact(one, self.moment_bits)
        ]
        check_places(matrices)
        for parameter in matrices:
            if not self.state[parameter]:
                self._begin(parameter)
        self.offloaded = Offload(folder, {one: self.state[one] for one in matrices})
        return self

    def _watch(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.requires_grad and is_compact(parameter, self.moment_bits):
                self.backward.watch(parameter)

    def _number(self) -> None:
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._places.setdefault(parameter, (number, len(self._places)))

    def __getstate__(self) -> dict[str, Any]:
        own = {"moment_bits": self.moment_bits, IN_BACKWARD: self.backward is not None}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy or a state dict. Raises ValueError: another kind of Adam made
        it."""
        again = state.pop(IN_BACKWARD, False)
        super().__setstate__(state)
        self._clear()
        self._number()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _check_group(group)
        for parameter, kept in self.state.items():
            if kept:
                self.state[parameter] = self._loaded(parameter, kept)
        if again:
            self.step_in_backward()

    def _loaded(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, of whichever Adam, as this one's."""
        if "max_exp_avg_sq" in state:
            raise ValueError("the state is of an Adam with amsgrad, which this one does not have")
        for name, value in state.items():
            if isinstance(value, _Bytes):
                state[name] = value.tensor.to(parameter.device)
        if "state1" in state:
            state = moments.of_bitsandbytes(state, parameter)
        missing = [name for name in STATE if name not in state]
        if missing:
            raise ValueError(
                f"the state of a parameter has {', '.join(state)}, but no {missing[0]}: of no Adam"
            )
        if moments.FIRST + moments.SCALE in state:
            moments.check_codes(parameter, state)
        else:
            check_moments(parameter, state["exp_avg"], state["exp_avg_sq"])
        bits = self.moment_bits if parameter.dim() > 1 else 32
        return moments.with_bits({**state, "step": int(state["step"])}, parameter, bits)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, of torch.optim's Adam or AdamW, or of fairseq's Adam.
        Raises ValueError: it does not fit the parameters, or has options that this Adam lacks."""
        before = {name: one for name, one in self.__getstate__().items() if name != IN_BACKWARD}
        states = {
            number: {
                name: _Bytes(one) if getattr(one, "dtype", None) == torch.uint8 else one
                for name, one in state.items()
            }
            for number, state in state_dict["state"].items()
        }
        try:
            super().load_state_dict({**state_dict, "state": states})
        except ValueError:
            self.__dict__.update(before)
            raise
        if self.offloaded is not None:
            for parameter, state in self.state.items():
                self.offloaded.hold(parameter, state)
        if self.backward is not None:
            self.backward.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.gradient_factor = 1.0
        if self.backward is not None:
            self.backward.forget()

    def multiply_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number, or a tensor [] or [1], until `step` or `zero_grad`.
        Raises RuntimeError: backward passes have used gradients already."""
        if self.backward is not None:
            raise RuntimeError(
                "backward passes have used the gradients of matrices already (step_in_backward), so"
                " that no factor reaches them; multiply the loss instead"
            )
        self.gradient_factor = self.gradient_factor * factor

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, aggregate: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the norm float32 [] of all gradients, with other processes' shards of them. If it
        exceeds `max_norm`, the next step shortens them to that; after `step_in_backward`, the
        next backward passes, too.

        Args:
            max_norm: largest norm; 0 or less clips nothing.
            aggregate: turns the norm of this process into the norm of all processes.

        Raises:
            ValueError: gradients are sparse, or some are shards and others are not.
        """
        prepared, _ = self._prepared()
        compact = self._compact_gradients()
        every = [*compact, *(one for updates in prepared for one in updates.parameters)]
        if len({(one.device_mesh, one.placements) if is_shard(one) else None for one in every}) > 1:
            raise ValueError(
                "gradients are shards on several meshes, or some are shards and others are not;"
                " clip them by torch.nn.utils.clip_grad_norm_"
            )
        nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
        norms = [updates.norm() for updates in prepared]
        norms += [torch.tensor([norm_of(one.grad)], device=one.device) for one in compact]
        if every and is_shard(every[0]):
            norms = [whole_norm(torch.cat(norms).norm().view(1), every[0])]
        if self.backward is not None:
            self.backward.max_norm = max(float(max_norm), 0.0)
            norms.append(torch.tensor([self.backward.norm]))
        norms = norms or [nothing]
        device, factor = norms[0].device, self.gradient_factor
        if isinstance(factor, Tensor):
            factor = factor.to(device, non_blocking=True)
        norm = torch.cat([norm.to(device) for norm in norms]).norm() * factor
        if aggregate is not None:
            norm = aggregate(norm)
        if max_norm > 0:
            self.gradient_factor = factor * (float(max_norm) / (norm + 1e-6)).clamp(max=1)
        return norm

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backward passes within; the next pass adds to them. It matters
        after `step_in_backward`."""
        with self.backward.accumulate() if self.backward is not None else nullcontext():
            yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and return what `closure` returns, if given. Raises ValueError: a gradient
        is sparse, or a parameter is no longer float32 and contiguous."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        prepared, numbers = self._prepared()
        if self.backward is not None:
            norms = [whole_norm(one.norm(), one.parameters[0]) for one in prepared]
            self.backward.finish(norms)
            if self.backward.max_norm > 0 and not isinstance(self.gradient_factor, Tensor):
                self.clip_grad_norm(self.backward.max_norm)
        for parameter in self._compact_gradients():
            self._step_alone(parameter, parameter.grad, self.gradient_factor)
        for updates in prepared:
            updates.run(numbers, self.gradient_factor)
            for parameter in updates.parameters:
                self.state[parameter]["step"] += 1
        self.gradient_factor = 1.0
        return loss

    def _prepared(self) -> tuple[list[Updates], Tensor]:
        """Return each device's updates, with current gradients, and all numbers [rows, NUMBERS]."""
        members: dict[torch.device, Members] = defaultdict(Members)
        rows: dict[tuple[int, int], int] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or is_compact(parameter, self.moment_bits):
                    continue
                state = self.state[parameter]
                if not state:
                    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    state |= {"step": 0, "exp_avg": first, "exp_avg_sq": second}
                row = rows.setdefault((number, state["step"] + 1), len(rows))
                members[parameter.device].add(
                    parameter, gradient, state["exp_avg"], state["exp_avg_sq"], row
                )
        for device, these in members.items():
            if device not in self._updates or not self._updates[device].fits(these, len(rows)):
                take(self, these.parameters)
                target = self.backend or for_device(device)
                self._updates[device] = Updates(target, these, len(rows))
            self._updates[device].put(these)
        numbers = [self._numbers(*each) for each in rows]
        numbers = numbers or [torch.empty(0, dtype=torch.float32, device="cpu")]
        return [self._updates[device] for device in members], torch.stack(numbers)

    def _compact_gradients(self) -> list[Tensor]:
        """Return the parameters that step alone and have a gradient."""
        every = [one for group in self.param_groups for one in group["params"]]
        return [one for one in every if one.grad is not None and is_compact(one, self.moment_bits)]

    @torch.no_grad()
    def _step_alone(self, parameter: Tensor, gradient: Tensor, factor: float | Tensor) -> None:
        """Step a matrix whose weight or moments have 8 bits."""
        state = self.state[parameter] or self._begin(parameter)
        if self.offloaded is not None:
            self.offloaded.stepping(parameter)
        group, number = self._places[parameter]
        update = self._compact.get(parameter)
        if update is None or not update.fits(state):
            target = self.backend or for_device(parameter.device)
            update = self._compact[parameter] = CompactUpdate(target, parameter, state, number)
        state["step"] += 1
        update.run(gradient, self._numbers(group, state["step"]), factor, state["step"])

    def _begin(self, parameter: Tensor) -> dict[str, Any]:
        """Return the first state of a matrix that steps alone."""
        state = self.state[parameter]
        state |= {"step": 0, **moments.zeros(parameter, self.moment_bits)}
        return state

    def _numbers(self, number: int, step: int) -> Tensor:
        group = self.param_groups[number]
        return scalars(
            float(group["lr"]),
            group["betas"],
            group["eps"],
            step,
            weight_decay=group["weight_decay"],
            torch_epsilon=group["torch_epsilon"],
        )


class _Bytes:
    """A tensor of codes in a state that is loaded: torch.optim would make floats of it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for options that a group cannot have."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not isinstance(value, Real) or not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a number from 0 on, and no tensor")
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas is {betas!r}; it must be two numbers from 0 to below 1")
    asked = [name for name in REFUSED if group.get(name)]
    if asked:
        raise ValueError(
            f"{asked[0]} is {group[asked[0]]!r}, which lsq's Adam does not have; take"
            " torch.optim.Adam"
        )
    if not group["decoupled_weight_decay"] and group["weight_decay"]:
        raise ValueError(
            f"weight_decay is {group['weight_decay']!r} and not decoupled, as torch.optim.Adam has"
            " it; lsq's Adam decays weights as AdamW does: take torch.optim.Adam, or load a state"
            " without weight_decay"
        )
    for parameter in group["params"]:
        if trains_codes(parameter):
            continue
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is {parameter.dtype} with strides"
                f" {parameter.stride()}; lsq's Adam takes contiguous float32: convert it with"
                " .float() and .contiguous(), or take torch.optim.Adam"
            )

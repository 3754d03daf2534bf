"""Error feedback: what rounding took from a gradient is added to the next one (Seide et al. 2014,
"1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019).

Residuals belong to parameters, by name: DDP puts parameters into other buckets after its first
    step. Where a step is
not finite on some worker, all skip it and begin anew from zero: a loss scaler will have changed the
    unit of gradients.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

PREFIX = "residual."
"""Stands before a parameter's name in a state."""


class ErrorFeedback:
    """The residuals of one worker: float32, one for each value of each parameter.

    Args:
        named_parameters: the parameters of the model with their names.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]):
        named = list(named_parameters)
        self._names = {id(parameter): name for name, parameter in named}
        self._sizes = {name: parameter.numel() for name, parameter in named}
        self._waiting: dict[
            str, Tensor
        ] = {}  # loaded, or from buckets that are no more: name -> residual, flat
        self._buckets: dict[
            tuple[str, ...], Tensor
        ] = {}  # names of parameters -> residuals, one after another
        self._finite: Tensor | None = None
        self._last_index = -1

    def begin(self, index: int, parameters: Sequence[Tensor], buffer: Tensor) -> Tensor:
        """Add a bucket's residuals to `buffer`, float [n]; where the exchange is to write its
        error, float32 [n].

        The memory that is returned holds zeros, for values whose error other workers keep.

        Args:
            index: of the bucket. They rise within a step: one that does not begins a new step. It
                need not be 0, as DDP can leave out buckets that no worker used.
            parameters: whose gradients lie in `buffer`, in this order.
        """
        if index <= self._last_index:
            self._settle()
        self._last_index = index
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        if names not in self._buckets:
            self._arrange(names, buffer.device)
        residuals = self._buckets[names]
        buffer.add_(residuals)
        return residuals.zero_()

    def end(self, mean: Tensor) -> None:
        """Take note of a bucket's mean, float [n]: whether it is finite decides about the residuals
        of this step."""
        finite = mean.isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite

    def state(self) -> dict[str, Tensor]:
        """PREFIX and a parameter's name -> its residual, float32 of the parameter's number of
        values, copied."""
        self._settle()
        residuals = {name: _used_here(piece).clone() for name, piece in self._waiting.items()}
        for names, values in self._buckets.items():
            _used_here(values)
            residuals.update({name: piece.clone() for name, piece in self._pieces(names, values)})
        return {PREFIX + name: residuals[name] for name in sorted(residuals)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned, in a training of as many workers.

        Raises:
            ValueError: a name is unknown.
        """
        known = set(self._names.values())
        unknown = [
            name
            for name in state
            if name.removeprefix(PREFIX) not in known or not name.startswith(PREFIX)
        ]
        if unknown:
            raise ValueError(
                f"residuals were given for {', '.join(sorted(unknown)[:5])}, which this model does"
                " not have; "
                "start without them"
            )
        self._buckets.clear()
        self._finite = None
        self._waiting = {
            name.removeprefix(PREFIX): residual.flatten() for name, residual in state.items()
        }

    def _settle(self) -> None:
        """Forget the errors of the last step if it was not finite."""
        if self._finite is not None:
            for values in self._buckets.values():
                # Decided on the device: to look at the flag would make the host wait for a GPU.
                _used_here(values).copy_(torch.where(_used_here(self._finite), values, 0.0))
        self._finite = None

    def _arrange(self, names: tuple[str, ...], device: torch.device) -> None:
        """Make room for a bucket that was not seen before, with what is known of its parameters."""
        for key in [key for key in self._buckets if not set(key).isdisjoint(names)]:
            self._waiting.update(self._pieces(key, self._buckets.pop(key)))
        size = sum(self._sizes[name] for name in names)
        values = self._buckets[names] = torch.zeros(size, dtype=torch.float32, device=device)
        for name, piece in self._pieces(names, values):
            residual = self._waiting.pop(name, None)
            if residual is not None:
                piece.copy_(_used_here(residual))

    def _pieces(self, names: tuple[str, ...], values: Tensor) -> Iterable[tuple[str, Tensor]]:
        """(name, residual float32 [values]) of each parameter of a bucket, views."""
        return zip(names, values.split([self._sizes[name] for name in names]), strict=True)


def _used_here(tensor: Tensor) -> Tensor:
    """`tensor`, whose memory goes to nobody else before the current stream is done with it.

    Exchanges run on a side stream and states are saved and loaded on another; PyTorch knows of the
    one that allocated.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor

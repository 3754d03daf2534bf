"""Steps inside the backward pass: a matrix steps when its gradient is complete, which then is free.

At most one layer's gradients exist at a time. Four things differ from a step after the pass:

* The norm of all gradients is not known yet. `clip_grad_norm` of the optimizer clips the next
  passes by an estimate: what is known of a pass, and for the other matrices the norms of the pass
  before. So a matrix whose own gradient explodes is clipped in the same pass.
  torch.nn.utils.clip_grad_norm_ sees vectors alone.
* A gradient that is not finite steps nothing: neither its matrix nor those that come after it in
  this pass, nor vectors. Those before it have stepped, each as a whole. `step` raises
  FloatingPointError and says how many.
* Of several processes, only those of FSDP2 may: it calls the hooks of shards when their gradients
  are means of all. Norms are of all shards, so that processes agree on clipping and on errors.
* A second backward pass before `step` would step twice, and is refused. `accumulate` keeps the
  gradients of a pass, in 4 bytes a parameter, and the next pass adds to them.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from lsq.optim.compact import norm_of
from lsq.run.shards import is_shard, whole_norm

Step = Callable[[Tensor, Tensor, float], None]
"""Steps a parameter with a gradient and its factor."""
SQUARE, MOST = "square", "max_grad_norm"
"""Square of the norm of a matrix's last gradient, in its state; largest norm, in each group."""


class BackwardSteps:
    """The steps of one optimizer inside backward passes; `step` is a bound method of it."""

    def __init__(self, step: Step, optimizer: Optimizer):
        self._step, self._optimizer = weakref.WeakMethod(step), weakref.ref(optimizer)
        self._stepped: set[int] = set()
        self._skipped, self._keeps = 0, False
        self.settle()

    def settle(self) -> None:
        """Read what is known of norms from the optimizer, after a step or a resume."""
        states = self._optimizer().state.values()
        self._total = math.fsum(state.get(SQUARE, 0.0) for state in states)

    def watch(self, parameter: Tensor) -> None:
        """Step `parameter` as soon as a backward pass has its gradient."""
        parameter.steps = parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def max_norm(self) -> float:
        """Largest norm of all gradients; 0 clips nothing."""
        return self._optimizer().param_groups[0].get(MOST, 0.0)

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        for group in self._optimizer().param_groups:
            group[MOST] = value

    @property
    def norm(self) -> float:
        """The norm of the gradients of all matrices, as far as it is known."""
        return math.sqrt(max(self._total, 0.0))

    def factor(self) -> float:
        """The factor that shortens gradients to `max_norm`."""
        return min(1.0, self.max_norm / (self.norm + 1e-6)) if self.max_norm > 0 else 1.0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backward passes."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def _arrived(self, parameter: Tensor) -> None:
        step = self._step()
        if step is None or self._keeps:  # the optimizer is gone, or waits
            return
        alone = not distributed.is_initialized() or distributed.get_world_size() == 1
        if not (alone or is_shard(parameter)):
            raise RuntimeError(
                f"step_in_backward steps before the gradients of the other"
                f" {distributed.get_world_size() - 1} processes arrive, so that models would part;"
                " leave it out, or shard the model by FSDP2"
            )
        if id(parameter) in self._stepped:
            raise RuntimeError(
                f"a parameter {tuple(parameter.shape)} has stepped since the last call of"
                " optimizer.step(); call it after each backward pass, or run all passes but the"
                " last under optimizer.accumulate()"
            )
        gradient, parameter.grad = parameter.grad, None
        own = torch.tensor([norm_of(gradient)], dtype=torch.float64, device=gradient.device)
        norm = whole_norm(own, gradient).item()
        if self._skipped or not math.isfinite(norm):
            self._skipped += 1
            return
        self._stepped.add(id(parameter))
        state = self._optimizer().state[parameter]
        before = state.pop(SQUARE, 0.0)
        self._total += norm * norm - before
        step(parameter, gradient, self.factor())
        state[SQUARE] = norm * norm

    def finish(self, vectors: Iterable[Tensor]) -> None:
        """End a step. Raises FloatingPointError: a gradient of this pass was not finite, of a
        matrix or among the norms of `vectors`."""
        stepped, skipped = len(self._stepped), self._skipped
        if not skipped:
            for parameter, state in self._optimizer().state.items():
                if id(parameter) not in self._stepped:
                    state.pop(SQUARE, None)  # it has no gradient any more
            self.settle()
        self.forget()
        if skipped or not all(norm.isfinite().all() for norm in vectors):
            others = f"it and {skipped - 1} after it" if skipped else "vectors"
            raise FloatingPointError(
                f"a gradient is not finite: {stepped} matrices stepped in the backward pass before"
                f" it arrived, {others} did not; go back to a checkpoint, or catch this error and"
                " go on with other data"
            )

    def forget(self) -> None:
        """Begin anew after a pass that has failed."""
        self._stepped, self._skipped = set(), 0

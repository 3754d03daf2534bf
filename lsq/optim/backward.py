"""Steps inside the backward pass: a matrix steps when its gradient is complete, which then is free.

At most one layer's gradients exist at a time. Three things differ from a step after the pass:

* The norm of all gradients is not known yet. `clip_grad_norm` clips the next passes by an
  estimate: what is known of a pass, and for the other matrices the norms of the pass before. So a
  matrix whose own gradient explodes is clipped in the same pass.
* A gradient that is not finite steps nothing: neither its matrix nor those that come after it in
  this pass. Those before it have stepped, each as a whole. `step` raises FloatingPointError and
  says how many.
* A second backward pass before `step` would step twice, and is refused. `accumulate` keeps the
  gradients of a pass, in 4 bytes a parameter, and the next pass adds to them.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, distributed

from lsq.optim.compact import norm_of

Step = Callable[[Tensor, Tensor, float], None]
"""Steps a parameter with a gradient and its factor."""


class BackwardSteps:
    """The steps of one optimizer inside backward passes; `step` is a bound method of it.

    `max_norm`: see the module; 0 clips nothing.
    """

    def __init__(self, step: Step):
        self._step, self.max_norm = weakref.WeakMethod(step), 0.0
        self._squares: dict[int, float] = {}
        self._stepped: set[int] = set()
        self._skipped = 0
        self._keeps = False

    def watch(self, parameter: Tensor) -> None:
        """Step `parameter` as soon as a backward pass has its gradient."""
        parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def norm(self) -> float:
        """The norm of the gradients of all matrices, as far as it is known."""
        return math.sqrt(math.fsum(self._squares.values()))

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
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError(
                "step_in_backward steps before the gradients of the other"
                f" {distributed.get_world_size() - 1} processes arrive, so that models would part;"
                " leave it out"
            )
        if id(parameter) in self._stepped:
            raise RuntimeError(
                f"a parameter {tuple(parameter.shape)} has stepped since the last call of"
                " optimizer.step(); call it after each backward pass, or run all passes but the"
                " last under optimizer.accumulate()"
            )
        gradient, parameter.grad = parameter.grad, None
        norm = norm_of(gradient)
        if self._skipped or not math.isfinite(norm):
            self._skipped += 1
            return
        self._stepped.add(id(parameter))
        self._squares[id(parameter)] = norm * norm
        step(parameter, gradient, self.factor())

    def finish(self) -> None:
        """End a step. Raises FloatingPointError: a gradient of this pass was not finite."""
        stepped, skipped = len(self._stepped), self._skipped
        self._stepped, self._skipped = set(), 0
        if skipped:
            raise FloatingPointError(
                f"a gradient is not finite: {stepped} matrices stepped in the backward pass before"
                f" it arrived, it and {skipped - 1} after it did not, nor did other parameters; go"
                " back to a checkpoint, or catch this error and go on with other data"
            )

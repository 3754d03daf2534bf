"""What crosses a border of a program and lies in planned memory: it is lent, and its place is
needed again.

Lent are results that go straight into other programs, their gradients on the way back, and
gradients of the leaves of autograd's graph. The first of these becomes `parameter.grad` and stays
until the next step begins; others are added to it. Whoever keeps one longer (no zero_grad, a list
of states, hooks, torch.autograd.grad) keeps it for good: it moves to memory of its own before its
place is used again.
"""

import math
import os
import weakref

import torch

from lsq.memory.arena import Arena


class Loan:
    """A tensor in the arena in other hands, with a storage of its own, by which is seen whether
    anybody holds it.

    Args:
        tensor: that one.
        memory: dies with its storage.
        until: position of the pass, among those of the step, after which its place is needed.
        keep: hold it until then, so that autograd never makes it the parameter's gradient. A
            contribution that others are added to in place must not be held.
        leaf: whose `grad` it may become.
        label: for people.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        memory: weakref.ref,
        *,
        until: int,
        keep: bool,
        leaf: weakref.ref | None,
        label: str,
    ):
        self.until, self.label = until, label
        self._held = tensor if keep else None
        self._tensor, self._memory = weakref.ref(tensor), memory
        self.leaf, self._address = leaf, tensor.data_ptr()

    def follow(self) -> None:
        """Autograd makes it the `grad` of a leaf as another tensor on the same memory: that is the
        one from then on."""
        leaf = self.leaf and self.leaf()
        gradient = None if leaf is None or self._memory() is None else leaf.grad
        if (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == self._address
        ):
            self._tensor = weakref.ref(gradient)

    def end(self) -> bool:
        """Whether nobody holds it any more; the tensor itself is moved away from whoever does, a
        view cannot be."""
        self._held = None
        self.follow()
        if self._memory() is not None and (tensor := self._tensor()) is not None:
            tensor.data = tensor.data.clone()
        return self._memory() is None


class Loans:
    """What is lent out now."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._open: list[Loan] = []
        _everywhere.add(self)

    def lend(self, offset: int, shape, dtype: torch.dtype, **options) -> torch.Tensor:
        """A tensor at byte `offset` to give away; `options` as Loan takes them."""
        tensor, memory = self._arena.lend(offset, shape, dtype)
        loan = Loan(tensor, memory, **options)
        self._open.append(loan)
        # once backward() is through: until then hooks may still replace the gradient
        if loan.leaf is not None:
            torch.autograd.Variable._execution_engine.queue_callback(loan.follow)
        return tensor

    def move(self, position: float = math.inf) -> None:
        """Move what was lent until a pass before `position`, and is still held, to memory of its
        own; views stay."""
        self._open = [loan for loan in self._open if loan.until >= position or not loan.end()]

    def end(self, position: float) -> None:
        """Take back what was lent until a pass before `position`.

        Raises:
            RuntimeError: somebody holds a view of it.
        """
        self.move(position)
        held = next((loan for loan in self._open if loan.until < position), None)
        if held is not None:
            raise RuntimeError(
                f"{held.label} lies in planned memory that is needed again, and something still"
                " holds a view of it; "
                "clone the views of results and gradients that you keep, or train without a plan"
                " (release_memory; "
                "LsqCallback without largest_batch; in fairseq --lsq-memory naive)"
            )


_everywhere: weakref.WeakSet[Loans] = weakref.WeakSet()


def _before_fork() -> None:
    """Arenas are zeros in a forked process: gradients that it may read are moved."""
    for loans in list(_everywhere):
        loans.move()


os.register_at_fork(before=_before_fork)

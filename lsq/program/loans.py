"""What crosses a border of a program and lies in planned memory: it is lent, and its place is needed again.

Lent are results that go straight into other programs, their gradients on the way back, and gradients of parameters
that autograd adds to what is there: to `parameter.grad`, or to an earlier contribution of the same step, which it holds
until the last one came. Whoever keeps one longer (a list of states, hooks, torch.autograd.grad) keeps it for good: it
moves to memory of its own before its place is used again.
"""

import weakref

import torch

from lsq.memory.arena import Arena


class Loan:
    """A tensor in the arena in other hands, with a storage of its own, by which is seen whether anybody holds it.

    Args:
        tensor: that one.
        memory: dies with its storage.
        until: position of the pass, among those of the step, after which its place is needed.
        keep: hold it until then, so that autograd never makes it the parameter's gradient. A contribution that others
            are added to in place must not be held.
        label: for people.
    """

    def __init__(self, tensor: torch.Tensor, memory: weakref.ref, *, until: int, keep: bool, label: str):
        self.until, self.label = until, label
        self._held = tensor if keep else None
        self._tensor, self._memory = weakref.ref(tensor), memory

    def end(self) -> bool:
        """Whether nobody holds it any more; the tensor itself is moved away from whoever does, a view cannot be."""
        self._held = None
        if self._memory() is not None and (tensor := self._tensor()) is not None:
            tensor.data = tensor.data.clone()
        return self._memory() is None


class Loans:
    """What is lent out now."""

    def __init__(self, arena: Arena):
        self._arena = arena
        self._open: list[Loan] = []

    def lend(self, offset: int, shape, dtype: torch.dtype, **options) -> torch.Tensor:
        """A tensor at byte `offset` to give away; `options` as Loan takes them."""
        tensor, memory = self._arena.lend(offset, shape, dtype)
        self._open.append(Loan(tensor, memory, **options))
        return tensor

    def end(self, position: float) -> None:
        """Take back what was lent until a pass before `position`.

        Raises:
            RuntimeError: somebody holds a view of it.
        """
        self._open = [loan for loan in self._open if loan.until >= position or not loan.end()]
        held = next((loan for loan in self._open if loan.until < position), None)
        if held is not None:
            raise RuntimeError(
                f"{held.label} lies in planned memory that is needed again, and something still holds a view of it; "
                "clone the views of results and gradients that you keep, or train without a plan (release_memory; "
                "--lsq-memory naive)"
            )

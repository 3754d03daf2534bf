"""Modules of other models that become lsq's, and float ones again, by a change of class."""

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from lsq.config import QuantConfig
from lsq.layers.builder import Mode
from lsq.layers.module import ProgramModule

_mode = functools.lru_cache(maxsize=1024)(Mode)
"""Makes one object for equal modes, with which cached programs are found faster."""


class InPlace(ProgramModule):
    """A module of another model whose class has become one of lsq's; parameters and hooks stay.

    A state dict without clips is complete: the next pass measures them.
    """

    takes_float_states = True
    float_class: type[nn.Module]
    any_width = False
    """Whether weights of widths that int8 products do not take are converted, too."""
    pads_rows = False
    """Whether codes of weights have as many rows as int8 products take."""

    @classmethod
    def covers(cls, path: str) -> bool:
        """Whether a program multiplies by the linear layer at `path` inside of the module."""
        return True

    def take_place(self, quant: QuantConfig, path: str) -> None:
        """Set up the module at `path` after its class has changed; ValueError without a program."""
        raise NotImplementedError

    def finish_conversion(self, check: bool) -> None:
        """Finish a conversion that has succeeded; `check`: compare the first pass with floats."""

    def holders(self, name: str) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (path, module, name in the module) of each parameter that `name` joins."""
        yield name, *self._holder(name)

    def forget_floats(self, name: str) -> None:
        """Drop what was made from the floats of a weight that is codes alone from now on."""
        self.weight_state.forget(name)

    def mode_of(self, inputs: Mapping[str, torch.Tensor]) -> Mode:
        """Return the mode of a pass, as `mode` does, but only with gradients that are needed."""
        backward = self.wants_backward(*inputs.values())
        wanted = [name for name, tensor in inputs.items() if backward and tensor.requires_grad]
        for name in self.declared if backward else ():
            parameter = self._parameters.get(name)
            if self._trains(name) if parameter is None else parameter.requires_grad:
                wanted.append(name)
        every = not backward or len(wanted) == len(inputs) + len(self.declared)
        return _mode(
            training=self.training,
            backward=backward,
            backend=self.target,
            wanted=None if every else frozenset(wanted),
        )

    def _trains(self, name: str) -> bool:
        return any([parameter.requires_grad for parameter in self.sources(name)])

    def give_place(self) -> None:
        """Change back to the float class."""
        if self.weight_masks is not None:
            self.weight_masks.remove(self)
        for name in self.clips():
            del self._parameters[self.state_name(name)]
        for name in self.STATE:
            self.__dict__.pop(name, None)
        if "parametrizations" in self._modules:  # parametrize has made a subclass of ours
            skipped = {"__dict__", "__weakref__"}
            attributes = {key: one for key, one in vars(type(self)).items() if key not in skipped}
            name = f"Parametrized{self.float_class.__name__}"
            self.__class__ = type(name, (self.float_class,), attributes)
        else:
            self.__class__ = self.float_class

    def __reduce_ex__(self, protocol):
        for kind in type(self).__mro__:
            if "made_by" in vars(kind):  # FSDP2 makes subclasses of ours
                return _unpickled, kind.made_by, self.__getstate__()
        return super().__reduce_ex__(protocol)


@functools.cache
def class_in_place(kind: type[InPlace], float_class: type[nn.Module], name: str) -> type[InPlace]:
    """Make the class of a converted `float_class`: a subclass of `kind` and of it."""
    attributes = {
        "float_class": float_class,
        "made_by": (kind, float_class, name),
        "__module__": kind.__module__,
    }
    return type(name, (kind, float_class), attributes)


def _unpickled(kind: type[InPlace], float_class: type[nn.Module], name: str) -> InPlace:
    both = class_in_place(kind, float_class, name)
    return both.__new__(both)

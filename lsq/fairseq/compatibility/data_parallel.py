"""Data parallel training on the CPU."""

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref] = weakref.WeakKeyDictionary()


class CPUSafeDataParallel(DistributedDataParallel):
    """DistributedDataParallel that ignores the device that fairseq names for modules on CPUs."""

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, **options):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids=device_ids, output_device=output_device, **options)
        _wrapped[module] = weakref.ref(self)

    @classmethod
    def around(cls, module: torch.nn.Module) -> "CPUSafeDataParallel | None":
        """The data parallel module that was last made of `module`; None: there is none."""
        return _wrapped.get(module, lambda: None)()

"""Masks of a module's weights: what of them programs read. How masks are chosen: lsq.sparsity."""

import torch
from torch import nn

from lsq.program import shards
from lsq.quant import pack_bits, unpack_bits

SUFFIX = "_kept"
"""What the buffer of a weight's mask is called behind the weight's own name."""


class WeightMasks:
    """Those of one module. A mask lies beside its weight, as a buffer of one bit for each value (quant.pack_bits).

    Weights themselves keep all their values, which go on learning where gradients are `straight_through`.

    Attributes:
        names: of the weights that have a mask, as programs call them.
        active: whether masks count; else weights are read as they are.
        straight_through: whether the gradient of what a mask leaves is that of the whole weight (Bengio et al. 2013,
            arXiv:1308.3432); else what is masked gets none.
    """

    def __init__(self):
        self.names: list[str] = []
        self.active = self.straight_through = False
        self._unpacked: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Buffer, its version and mask."""

    def __getstate__(self):
        return {**self.__dict__, "_unpacked": {}}

    def add(self, module: nn.Module, name: str) -> None:
        """Give a weight of `module` a mask, which keeps all of it."""
        holder, last = module._holder(name)
        every = torch.ones(module.own_parameter(name).shape, dtype=torch.bool, device=module.own_parameter(name).device)
        holder.register_buffer(last + SUFFIX, pack_bits(every))
        self.names.append(name)

    def remove(self, module: nn.Module) -> None:
        """Take all masks away; zeros are written where they were active, so that nothing else is computed."""
        if self.active:
            self.write_zeros(module)
        for name in self.names:
            holder, last = module._holder(name)
            del holder._buffers[last + SUFFIX]
        module.weight_masks = None
        module._drop_codes()

    def put(self, module: nn.Module, name: str, mask: torch.Tensor) -> None:
        """Let a weight have another mask: bool, of the weight's shape."""
        self._bits(module, name).copy_(pack_bits(mask))
        module._drop_codes()

    def activate(self, module: nn.Module, active: bool) -> None:
        """Let masks count, or not."""
        self.active = active
        module._drop_codes()

    def mask(self, module: nn.Module, name: str) -> torch.Tensor:
        """bool, of the weight's shape: True is kept."""
        bits = self._bits(module, name)
        buffer, version, found = self._unpacked.get(name, (None, 0, None))
        if buffer is not bits or version != bits._version:
            shape = module.declared[name].shape
            found = unpack_bits(bits, shape[0] * shape[1]).view(shape)
            self._unpacked[name] = bits, bits._version, found
        return found

    def apply(self, module: nn.Module, name: str, values: torch.Tensor) -> torch.Tensor:
        """What a mask leaves of `values`, a weight of the module; all where it has none. NaN stays NaN."""
        if not self.active or name not in self.names:
            return values
        return _Masked.apply(values, self.mask(module, name), self.straight_through)

    @torch.no_grad()
    def write_zeros(self, module: nn.Module) -> None:
        """Write what masks leave of the weights into these."""
        for name in self.names:
            for part, kept in self.parts(module, name):
                part.mul_(kept)
        module._drop_codes()

    def parts(self, module: nn.Module, name: str) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that a weight is made of, each with its part of the mask; raises as `check_whole`."""
        check_whole(module, name)
        found = module.sources(name)
        return list(zip(found, self.mask(module, name).split([len(part) for part in found]), strict=True))

    @staticmethod
    def _bits(module: nn.Module, name: str) -> torch.Tensor:
        holder, last = module._holder(name)
        return holder._buffers[last + SUFFIX]


def check_whole(module: nn.Module, name: str) -> None:
    """Refuse a weight of which this process has a part alone.

    Raises:
        ValueError: it is a shard of FSDP2.
    """
    if any(map(shards.is_shard, module.sources(name))):
        raise ValueError(
            f"{name} of this {type(module).__name__} is a shard of FSDP2, which masks do not know; train sparse "
            "weights with DistributedDataParallel"
        )


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, mask, straight_through):
        if not straight_through:
            ctx.save_for_backward(mask)
        return values * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] if ctx.saved_tensors else gradient, None, None

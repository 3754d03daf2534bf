"""Masks of a module's weights, chosen by lsq.models.sparsity: programs read masked weights."""

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from lsq.quant import pack_bits, unpack_bits
from lsq.quant.pruning import GROUP, KEPT, check_width
from lsq.run import shards

SUFFIX = "_kept"
ALONE = (
    "a layer that is to be sparse trains, but its masks stay as they are, and nothing is pruned if"
    " there are none yet; call lsq.models.sparsity.sparsity_of(model).follow(optimizer) before the"
    " training, as LsqCallback and the tasks of `lsq train` do, or finish() of what that returns"
)


def bytes_of(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Return a mask's bytes, uint8 [N]; raises ValueError for a damaged mask or a mean of masks."""
    found = stored.float().round().to(torch.uint8)
    whole = bool(((found - stored.float()).abs() <= 0.25).all())
    bits = 8 * found.numel()
    sizes = (bits, bits - GROUP)  # GROUP divides the number of weights
    counts = (*sizes, *(size * KEPT // GROUP for size in sizes))
    if not whole or int(unpack_bits(found, bits).sum()) not in counts:
        raise ValueError(
            f"{name} in the checkpoint is no mask of two of four weights; if it is the mean of"
            " several checkpoints, their masks differ: take those of a time when masks stay, or"
            " revert to floats before"
        )
    return found


def without_masks(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with zeros in weights in place of their masks, for a dense model.

    Masks without a weight stay. Raises ValueError for a mask of another size.
    """
    found = dict(state)
    for name in state:
        of = name.removesuffix(SUFFIX)
        if of != name and of in state:
            weight = state[of]
            bits = unpack_bits(bytes_of(found.pop(name), name), weight.numel())
            found[of] = weight * bits.view_as(weight)
    return found


class WeightMasks:
    """The masks of one module: a buffer of one bit for each value beside each weight.

    A byte is stored as float16, so that the mean of equal masks is the same mask. Weights keep all
    values; masked ones learn, too, by `straight_through` gradients (Bengio et al. 2013,
    arXiv:1308.3432). `active`: a mask leaves values out. `followed`: a Sparsity chooses masks.
    """

    def __init__(self, *, straight_through: bool):
        self.names: list[str] = []
        self.active = self.followed = False
        self.straight_through = straight_through
        self._unpacked: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def state_names(self, module: nn.Module) -> list[str]:
        return [module.state_name(name) + SUFFIX for name in self.names]

    def __getstate__(self):
        return {**self.__dict__, "_unpacked": {}, "followed": False}

    def add(self, module: nn.Module, name: str) -> None:
        """Give a weight a mask that keeps all values; ValueError unless 4 divides its width."""
        declared = module.declared[name]
        check_width(name, declared.shape[0 if declared.in_out else 1])
        holder, last = module._holder(name)
        holder.register_buffer(last + SUFFIX, pack_bits(self._everything(module, name)).half())
        self.names.append(name)

    def remove(self, module: nn.Module) -> None:
        """Remove all masks; if they were active, write zeros into the weights first."""
        if self.active:
            self.write_zeros(module)
        for name in self.names:
            holder, last = module._holder(name)
            del holder._buffers[last + SUFFIX]
        module.weight_masks = None
        module._drop_codes()

    def put(self, module: nn.Module, name: str, mask: torch.Tensor) -> None:
        """Replace the mask of a weight by `mask`: bool, of the weight's shape."""
        self._bits(module, name).copy_(pack_bits(mask))
        self.active = True
        module._drop_codes()

    def fill(self, module: nn.Module) -> None:
        """Let all masks keep all values."""
        for name in self.names:
            self._bits(module, name).copy_(pack_bits(self._everything(module, name)))
        self.active = False
        module._drop_codes()

    def load(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str) -> None:
        """Prepare `state` for loading: weights of a dense model get masks that keep all values."""
        paths = {
            id(one): prefix + path for path, one in module.named_parameters(remove_duplicate=False)
        }
        counts = []
        for name in self.names:
            mask = prefix + module.state_name(name) + SUFFIX
            full = pack_bits(self._everything(module, name))
            if any(paths[id(one)] in state for one in module.sources(name)):
                state.setdefault(mask, full)
            found = bytes_of(state.get(mask, self._bits(module, name)), mask)
            if mask in state:
                state[mask] = found
            counts.append(not torch.equal(found.to(full.device), full))
        self.active = any(counts)

    def mask(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return the mask of a weight: bool, of its shape, True is kept."""
        bits = self._bits(module, name)
        buffer, version, found = self._unpacked.get(name, (None, 0, None))
        if buffer is not bits or version != bits._version:
            shape = module.declared[name].shape
            found = unpack_bits(bits.to(torch.uint8), shape[0] * shape[1]).view(shape)
            self._unpacked[name] = bits, bits._version, found
        return found

    def apply(self, module: nn.Module, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, a weight of the module, with zeros by its mask; NaN stays NaN."""
        if not self.active or name not in self.names:
            return values
        return _Masked.apply(values, self.mask(module, name), self.straight_through)

    @torch.no_grad()
    def write_zeros(self, module: nn.Module) -> None:
        """Write zeros into weights where masks leave values out."""
        for name in self.names:
            for part, kept in self.parts(module, name):
                part.mul_(kept)
        module._drop_codes()

    def parts(self, module: nn.Module, name: str) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return a weight's parameters with their parts of the mask; ValueError for shards."""
        check_whole(module, name)
        parts = module.sources(name)
        masks = self.mask(module, name).split([len(part) for part in parts])
        return list(zip(parts, masks, strict=True))

    def warn_alone(self) -> None:
        """Warn once that the module trains while no Sparsity chooses its masks."""
        if not self.followed:
            self.followed = True
            warnings.warn(ALONE, stacklevel=2)

    @staticmethod
    def _everything(module: nn.Module, name: str) -> torch.Tensor:
        weight = module.own_parameter(name)
        return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)

    @staticmethod
    def _bits(module: nn.Module, name: str) -> torch.Tensor:
        holder, last = module._holder(name)
        return holder._buffers[last + SUFFIX]


def check_whole(module: nn.Module, name: str) -> None:
    """Raise a ValueError for a shard of FSDP2."""
    if any(map(shards.is_shard, module.sources(name))):
        raise ValueError(
            f"{name} of this {type(module).__name__} is a shard of FSDP2, which masks do not know;"
            " train sparse weights with DistributedDataParallel"
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

"""Codes of the weights of a module: made anew for a training pass, or kept while nothing changes."""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lsq.backends import Backend
from lsq.ops.fake_quantize import decode_weight
from lsq.ops.grouped_weight import pack_weight
from lsq.ops.rounding import RoundWeight
from lsq.program import upkeep
from lsq.program.program import Program
from lsq.program.values import Weight
from lsq.quant import WeightFormat
from lsq.quant.numbers import ScaledFormat


class WeightCodes:
    """Those of one module. In eval mode they are kept until a parameter changes.

    In training mode their memory is written again for the same parameters alone: an earlier pass with others, such as
    those of torch.func.functional_call, may still await its backward pass. Where the optimizer has made the codes of
    the weights as they are (lsq.optim.Adam), nothing is written.

    Attributes:
        kept: by the names of the programs' inputs.
    """

    def __init__(self, sums: dict[str, torch.Tensor] | None = None):
        """`sums`: those of another, of the same weights."""
        self.kept: dict[str, torch.Tensor] = {}
        self._made_from: tuple = ()
        self._owners: dict[str, tuple[int, int]] = {}
        self._sums = dict(sums or {})
        self._probes: list[torch.Tensor] = []

    def __reduce__(self):
        return WeightCodes, (self._sums,)  # a copy of a module makes its own codes

    def clear(self) -> None:
        """They are of no use any more."""
        self.kept.clear()

    def changed(self, name: str, values: torch.Tensor) -> bool:
        """Whether rows of a weight hold other values than when this was asked last; versions miss what FSDP2 gathers.

        Values that change places within a row count for nothing, nor do they for its clip. On other devices than the
        CPU always, since the answer would have to be waited for.

        Args:
            name: of the weight.
            values: [R, N], a row for each clip, if there are several.
        """
        if values.device.type != "cpu":
            return True
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        before, self._sums[name] = self._sums.get(name), values.detach().view(bits).sum(1, dtype=torch.int64)
        return before is None or not torch.equal(before, self._sums[name])

    @torch.inference_mode(False)  # what is kept may be needed where gradients are
    @torch.no_grad()
    def of(
        self, program: Program, parameters: Mapping[str, torch.Tensor], place: Backend, *,
        every: Iterable[nn.Parameter], training: bool, watched: bool = False,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Codes and scale of every weight of `program`, by the names of its inputs.

        Args:
            program: about to run.
            parameters: its parameters by name, whose codes are wanted.
            place: where it runs.
            every: all parameters of the module; when one of them changes in eval mode, nothing kept is right any more.
            training: whether the module is trained, so that its weights change with every pass.
            watched: some values of every weight are compared (on the CPU), since others change them through `.data`.
        """
        made_from = () if training else tuple(
            (weakref.ref(tensor.untyped_storage()), tensor.data_ptr(), tensor._version) for tensor in every
        )
        probes = [] if training or not watched else [
            one for virtual in program.weights.values() if virtual.written
            for one in upkeep.probe(parameters[virtual.values.name], parameters[virtual.clip.name])
        ]  # fmt: skip
        unchanged = made_from == self._made_from and all(map(torch.equal, self._probes, probes))
        kept, codes, lasting = self.kept if unchanged else {}, {}, {}
        for virtual in program.weights.values():
            if not virtual.written:
                continue
            values, clip = parameters[virtual.values.name], parameters[virtual.clip.name]
            lasts = isinstance(values, nn.Parameter)  # else it is made of several, for this pass
            owner = id(values), id(clip)
            mine = not training or owner == self._owners.get(virtual.values.name)
            made = {tensor.name: kept.get(tensor.name) if mine else None for tensor in virtual.written}
            if training or None in made.values():
                _allocate(virtual, made, place)
                tensors = {**parameters, **made}
                weight = virtual.bind(
                    lambda tensor, tensors=tensors: tensors[tensor.name].detach().to(tensor.dtype).contiguous()
                )
                if not (training and lasts and upkeep.current(values, clip, weight)):
                    _make(weight, place)
                    coded = weight.codes is not None
                    if training and lasts and coded and not weight.by_inputs:  # others no optimizer rounds
                        upkeep.offer(values, clip, weight.bare())
            codes |= made
            if lasts:
                lasting |= made
                self._owners[virtual.values.name] = owner
        self._probes = [one.clone() for one in probes]
        self.kept, self._made_from = kept | lasting, made_from  # when they are whole: other threads may look
        return codes


def _allocate(virtual: Weight, made: dict[str, torch.Tensor | None], place: Backend) -> None:
    """Put memory where `made` has none, or that of another size."""
    for tensor in virtual.written:
        before = made[tensor.name]
        if before is None or tuple(before.shape) != tensor.shape:
            made[tensor.name] = place.allocate(tensor.shape, tensor.dtype)


def _make(weight: Weight, place: Backend) -> None:
    """Write what is written of a weight."""
    if weight.codes is not None:
        place.run(RoundWeight(weight=weight))
    if weight.decoded is not None:
        place.run(decode_weight(weight))
    if weight.grouped is not None:
        pack_weight(weight, place.run)


def rounded_values(
    rows: torch.Tensor, clip: torch.Tensor, form: WeightFormat | ScaledFormat, place: Backend
) -> torch.Tensor:
    """What products see of a weight: float32 [N, K] of rows float32 [N, K] and clips [N] or [1]."""
    if isinstance(form, WeightFormat):
        stored, scale = form.encode(rows, clip)
        return form.unpack(stored, rows.shape[1]) * scale[:, None]
    weight = Weight(format=form, values=rows, clip=clip, decoded=torch.empty(rows.shape, device=rows.device))
    place.run(decode_weight(weight))
    return weight.decoded

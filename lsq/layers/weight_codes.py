"""Codes of the weights of a module: made anew where training changes them, or kept while nothing
does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lsq.layers.coded_weight import CodedWeight, Codes
from lsq.ops.fake_quantize import decode_weight
from lsq.ops.grouped_weight import pack_weight
from lsq.ops.rounding import RoundWeight
from lsq.program.program import Program
from lsq.program.values import Weight
from lsq.quant import WeightFormat
from lsq.quant.numbers import ScaledFormat
from lsq.run import upkeep
from lsq.run.backends import Backend
from lsq.run.stamp import Stamp, checksum


@dataclass(frozen=True, eq=False)
class Kept:
    """The codes of one weight."""

    made: dict[str, torch.Tensor]
    """By the names of the programs' inputs."""
    owner: tuple[int, int]
    """Ids of weight and clip."""
    made_from: tuple[Stamp, Stamp] | None
    """What the weight and its clip were, where no training changes them."""


class WeightCodes:
    """Those of one module. Those that are not trained are kept until a weight or its clip changes
    (lsq.run.stamp), and so are all in eval mode. Those that are codes alone (lsq.freeze) keep
    their own.

    Of the others, their memory is written again for the same parameters alone: an earlier pass with
    others, such as those of torch.func.functional_call, may still await its backward pass. Where
    the optimizer has made the codes of the weights as they are (lsq.optim.Adam), nothing is
    written.
    """

    def __init__(self, sums: dict[str, int | None] | None = None):
        """`sums`: those of another, of the same weights."""
        self._weights: dict[str, Kept] = {}
        """By the names of the weights."""
        self._sums = dict(sums or {})

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """What there is, by the names of the programs' inputs."""
        return {name: tensor for one in self._weights.values() for name, tensor in one.made.items()}

    def __reduce__(self):
        return WeightCodes, (self._sums,)  # a copy of a module makes its own codes

    def clear(self) -> None:
        """They are of no use any more."""
        self._weights.clear()

    def forget(self, name: str) -> None:
        """The same of one weight."""
        self._weights.pop(name, None)

    def changed(self, name: str, values: torch.Tensor) -> bool:
        """Whether a weight holds other values than when this was asked last; versions miss what
        FSDP2 gathers.

        On other devices than the CPU always, since the answer would have to be waited for.
        """
        before, self._sums[name] = self._sums.get(name), checksum(values)
        return before is None or before != self._sums[name]

    def check(
        self, name: str, parts: Sequence[torch.Tensor], clip: torch.Tensor, rows: int
    ) -> bool:
        """Forget what is kept of a weight if it has changed; whether its values have, but not its
        clip.

        Args:
            name: of the weight.
            parts: the parameters that it is made of.
            clip: of it.
            rows: of the pass that asks.
        """
        kept = self._weights.get(name)
        if kept is None or kept.made_from is None:
            return False
        weight, of_clip = kept.made_from
        as_before = of_clip.holds([clip])
        if as_before and weight.holds(parts, rows=rows):
            return False
        self._weights.pop(name, None)
        return as_before and not weight.same_values(parts)

    @torch.inference_mode(False)  # what is kept may be needed where gradients are
    @torch.no_grad()
    def of(
        self,
        program: Program,
        parameters: Mapping[str, torch.Tensor],
        place: Backend,
        *,
        changing: Callable[[str, torch.Tensor], bool],
        sources: Callable[[str], Sequence[torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Codes and scale of every weight of `program`, by the names of its inputs.

        Args:
            program: about to run.
            parameters: its parameters by name, whose codes are wanted.
            place: where it runs.
            changing: (name of a weight, its clip) -> whether training changes them. Else what is
                kept is right, since `check` has looked at it.
            sources: the parameters that a weight is made of, by its name.
        """
        codes, lasting = {}, {}
        for virtual in program.weights.values():
            if not virtual.written:
                continue
            name = virtual.values.name
            values, clip, parts = parameters[name], parameters[virtual.clip.name], sources(name)
            if type(values) is CodedWeight:
                codes |= values.given(virtual, (*parts, clip))
                continue
            kept, owner = self._weights.get(name), (id(values), id(clip))
            training = changing(name, clip)
            made_from = None if training or kept is None else kept.made_from
            mine = kept is not None and (kept.owner == owner if training else made_from is not None)
            made = {
                tensor.name: kept.made.get(tensor.name) if mine else None
                for tensor in virtual.written
            }
            alone = isinstance(values, nn.Parameter)  # else it is made of several, for this pass
            if training or None in made.values():
                _allocate(virtual, made, place)
                tensors = {**parameters, **made}
                weight = virtual.bind(
                    lambda tensor, tensors=tensors: (
                        tensors[tensor.name].detach().to(tensor.dtype).contiguous()
                    )
                )
                if not (training and alone and upkeep.current(values, clip, weight)):
                    _make(weight, place)
                    coded = weight.codes is not None
                    # others no optimizer rounds
                    if training and alone and coded and not weight.in_out:
                        upkeep.offer(values, clip, weight.bare())
            codes |= made
            if not training and all(isinstance(part, nn.Parameter) for part in parts):
                made_from = made_from or (Stamp(parts), Stamp([clip]))
            if alone or made_from:
                before = kept.made if mine else {}
                lasting[name] = Kept({**before, **made}, owner, made_from)
        self._weights = self._weights | lasting  # when they are whole: other threads may look
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
        place.run(RoundWeight(weight=weight, new_clip=weight.clip if weight.absmax else None))
    if weight.decoded is not None:
        place.run(decode_weight(weight))
    if weight.grouped is not None:
        pack_weight(weight, place.run)


@torch.inference_mode(False)
@torch.no_grad()
def encoded(
    values: torch.Tensor,
    clip: torch.Tensor,
    form: WeightFormat,
    place: Backend,
    *,
    rows: int,
    in_out: bool,
    absmax: bool,
) -> Codes:
    """Round a weight [N, K] to new codes as programs read them (see Weight); `rows`: P, at least
    N."""
    count, columns = values.shape[::-1] if in_out else values.shape
    stored = place.allocate((rows, form.stored_columns(columns)), form.storage)
    scale = place.allocate((rows,), torch.float32)
    _make(
        Weight(
            format=form,
            values=values.detach().float().contiguous(),
            clip=clip.detach(),
            codes=stored,
            scale=scale,
            in_out=in_out,
            absmax=absmax,
        ),
        place,
    )
    return Codes(
        format=form, stored=stored, scale=scale, rows=count, columns=columns, in_out=in_out
    )


def rounded_values(
    rows: torch.Tensor, clip: torch.Tensor, form: WeightFormat | ScaledFormat, place: Backend
) -> torch.Tensor:
    """What products see of a weight: float32 [N, K] of rows float32 [N, K] and clips [N] or [1]."""
    if isinstance(form, WeightFormat):
        stored, scale = form.encode(rows, clip)
        return form.unpack(stored, rows.shape[1]) * scale[:, None]
    weight = Weight(format=form, values=rows, clip=clip, decoded=torch.empty_like(rows))
    place.run(decode_weight(weight))
    return weight.decoded

"""What stands between two blocks, in one pass over each row: dropout, residual, norm, rounding.

    z = residual + dropout(update);   out = (z - mean) * rstd * weight + bias, as float, as codes,
    or both

`update` may be missing (a norm alone) and so may the norm (z is the result). The backward pass
finds z as it is, or the normalised row (z - mean) * rstd as codes, a fourth of the bytes: their
error reaches the gradient of z through one inner product of a row alone, and that of the weight as
errors of codes reach any weight's.

LayerNorm: Ba et al. 2016, biased variance. RMSNorm: Zhang and Sennrich 2019, without mean and bias.
M rows, H columns. Loops and kernels do what is said of sums in residual_sum.h and residual_sum.cuh.
"""

from __future__ import annotations

import torch

from lsq.native.geometry import MANY_BLOCKS, row_blocks, row_defines, sums_in_shared_memory
from lsq.native.launch import TICKET, float_define, launch
from lsq.ops.residual_sum import ResidualSum, ResidualSumGradient
from lsq.ops.scales import started
from lsq.ops.sums import PartialSums, as_parts, finish, parts_of
from lsq.program.declare import Activations, Codes, Floats, Host, In, Out, Value, extent, factor
from lsq.program.operation import Operation
from lsq.program.values import Coded
from lsq.quant import Format, arithmetic


class NormalisedRows(Value):
    """Rows [M, H] of mean square 1 as integers, each with a scale that its largest magnitude fits:
    codes * scale."""

    format: Host[Format]
    codes: Codes
    """[M, H]"""
    scale: Floats
    """[M]; NaN for a row that holds a NaN or an infinity."""

    @factor
    def largest(self) -> float:
        """Q."""
        return float(self.format.largest)

    def encode(
        self, centred: torch.Tensor, rstd: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: codes and scale of centred [M, H] * rstd [M]."""
        codes, scale = arithmetic.nearest_rows(centred, self.format.largest)
        return codes, scale * rstd

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [M, H]."""
        return self.codes.to(torch.float32) * self.scale[:, None]


class ResidualNorm(Operation):
    """z [M, H] of a residual and what a block adds to it; its norm and the codes of that."""

    sum: Out[ResidualSum]
    weight: In[Floats] | None
    """[H]; None: no norm."""
    bias: In[Floats] | None
    """[H], of LayerNorm."""
    epsilon: float = 1e-5
    mean: Out[Floats] | None
    """[M], of LayerNorm; None: it is not subtracted."""
    rstd: Out[Floats] | None
    """[M]"""
    normalised: Out[NormalisedRows] | None
    """[M, H], what the backward pass reads in place of z and the mean."""
    out: Out[Activations] | None
    """[M, H]"""
    rounded: Out[Coded] | None
    """[M, H]"""

    rows = extent(0, "sum.residual")
    columns = extent(1, "sum.residual")

    @property
    def same_values(self):
        return self.out, self.rounded and self.rounded.codes

    def reference(self):
        z = self.sum.compute()
        if self.weight is None:
            return z, *(None,) * 10
        mean = None if self.mean is None else z.mean(dim=1)
        centred = z if mean is None else z - mean[:, None]
        rstd = (centred.square().mean(dim=1) + self.epsilon).rsqrt()
        out = centred * rstd[:, None] * self.weight
        out = out if self.bias is None else out + self.bias
        kept = (None, None) if self.normalised is None else self.normalised.encode(centred, rstd)
        return (
            z,
            mean,
            rstd,
            *kept,
            out,
            *(self.rounded.encode(out) if self.rounded is not None else (None,) * 5),
        )

    def cuda(self):
        return [
            launch(
                "residual_norm.cu",
                "lsq_residual_norm",
                self,
                TICKET,
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS),
                **float_define(*self.sum.tensors, self.out),
                **row_defines(self.columns),
                **started(self.rounded),
            )
        ]

    def gradient(self, builder) -> None:
        normed = self.weight is not None
        dout = builder.gradient_sum(*self.same_values) if normed else None
        down = self.sum.gradient(builder, normed)
        kept = (
            {"normalised": self.normalised}
            if self.normalised
            else {"z": self.sum.kept, "mean": self.mean}
        )
        builder.add(
            ResidualNormGradient(
                dout=dout,
                rstd=self.rstd,
                centred=self.mean is not None,
                weight=self.weight,
                dweight=builder.parameter_gradient(self.weight),
                dbias=builder.parameter_gradient(self.bias),
                sum=down,
                **(kept if normed else {}),
            )
        )
        builder.accumulate(self.sum.residual, down.dresidual if normed else down.dz)


class ResidualNormGradient(Operation):
    """The gradients of ResidualNorm.

    Without a norm, the gradient of the residual is that of z itself.
    """

    dout: In[Activations] | None
    """[M, H], of the norm's result; None without a norm."""
    normalised: In[NormalisedRows] | None
    """[M, H]; None: z is read."""
    z: In[Activations] | None
    """[M, H]"""
    mean: In[Floats] | None
    """[M], of LayerNorm, with z."""
    rstd: In[Floats] | None
    """[M]"""
    centred: bool = False
    """Whether the norm has subtracted the mean, as LayerNorm does."""
    weight: In[Floats] | None
    """[H]"""
    dweight: Out[Floats] | None
    """[H]"""
    dbias: Out[Floats] | None
    """[H]"""
    sum: Out[ResidualSumGradient]
    parts: Out[Floats] | None
    """Of `dweight`, `dbias` and `sum.dupdate_sum`, in place of these; see lsq.ops.sums."""

    rows = extent(0, "dout", "sum.dz")
    columns = extent(1, "dout", "sum.dz")

    def reference(self):
        if self.dout is None:
            found = None, None, *self.sum.compute(None)
            return *found, self._as_parts(found)
        normalised = self._normalised()
        scaled = self.dout * self.weight
        projected = normalised * (scaled * normalised).mean(dim=1, keepdim=True)
        if self.centred:
            scaled = scaled - scaled.mean(dim=1, keepdim=True)
        through = self.rstd[:, None] * (scaled - projected)
        found = (
            (self.dout * normalised).sum(dim=0),
            self.dout.sum(dim=0),
            *self.sum.compute(through),
        )
        return *found, self._as_parts(found)

    def _normalised(self) -> torch.Tensor:
        if self.normalised is not None:
            return self.normalised.decode()
        return (self.z if self.mean is None else self.z - self.mean[:, None]) * self.rstd[:, None]

    def _as_parts(self, found):
        dweight, dbias, *_, dupdate_sum = found
        return as_parts(self.parts, self._sums(self.parts, (dweight, dbias), dupdate_sum))

    @property
    def _norm_sums(self) -> int:
        """Sums over rows of the norm itself: its weight's, and that of LayerNorm's bias."""
        return 0 if self.dout is None else 2 if self.centred else 1

    def _sums(self, parts, of_norm, of_update) -> PartialSums:
        outs = (*of_norm[: self._norm_sums], *([of_update] if self.sum.updated else []))
        return PartialSums.of(parts, self.columns, outs)

    def _parts(self):
        return parts_of(self.rows, self.columns, self._norm_sums + self.sum.updated)

    def leave_sums(self, tensor):
        parts = tensor(self.outputs[0].name + ".parts", *self._parts()) if self.outputs else None
        found = self._sums(parts, (self.dweight, self.dbias), self.sum.dupdate_sum)
        if not found.wanted:
            return []
        self.parts, self.dweight, self.dbias, self.sum.dupdate_sum = parts, None, None, None
        return [found]

    def cuda_scratch(self):
        return [] if self.parts is not None else [self._parts()]

    def cuda(self, *scratch):
        (partial,), down = scratch or (self.parts,), self.sum
        if not (self._norm_sums or down.updated):
            return []
        finished = finish(
            self._sums(partial, (self.dweight, self.dbias), down.dupdate_sum),
            leaves=self.parts is not None,
        )
        return [
            launch(
                "residual_norm.cu",
                "lsq_residual_norm_gradient",
                self,
                partial,
                grid=len(partial),
                shared=sums_in_shared_memory(self.columns, self._norm_sums),
                NORM_SUMS=self._norm_sums,
                NORMALISED=int(self.normalised is not None),
                PRODUCT=int(down.updated),
                ROUNDED=int(down.rounded is not None),
                **float_define(self.dout, self.z, *down.tensors),
                **row_defines(self.columns),
            ),
            *finished,
        ]

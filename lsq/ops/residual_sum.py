"""What norms between two blocks begin with, and where its gradients go: z = residual +
dropout(update).

`update` may be missing; z is then the residual. M rows, H columns. Loops and kernels share
residual_sum.h and residual_sum.cuh.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Activations, Floats, In, Value
from lsq.program.values import Dropout, RoundedGradient, dropped


class ResidualSum(Value):
    """z of a residual and what a block adds to it."""

    residual: In[Activations]
    """[M, H]"""
    update: In[Activations] | None
    """[M, H]"""
    dropout: In[Dropout] | None
    z: Activations | None
    """[M, H]; None: nobody reads it."""

    def compute(self) -> torch.Tensor:
        """Reference: z."""
        return (
            self.residual
            if self.update is None
            else self.residual + dropped(self.update, self.dropout)
        )

    @property
    def kept(self):
        """The tensor in which a backward pass finds z."""
        return self.residual if self.update is None else self.z

    @property
    def tensors(self) -> tuple:
        """Every activation."""
        return self.residual, self.update, self.z

    def gradient(self, builder, normed: bool) -> ResidualSumGradient:
        """Where the gradients go, with that of z so far; `normed`: one comes through a norm as
        well.

        Whoever adds the operation that writes them accumulates the gradient of the residual
        afterwards.
        """
        found = ResidualSumGradient(
            dropout=self.dropout, dupdate_sum=builder.bias_gradient(self.update)
        )
        if self.update is None:
            found.dz = builder.take_gradient(self.residual)
        else:
            found.dz = builder.gradient_of(self.z)
            found.dupdate, found.rounded = builder.product_gradient(self.update)
        if normed:
            found.dresidual = builder.like("d_" + self.residual.name, self.residual)
        return found


class ResidualSumGradient(Value):
    """The gradients of a ResidualSum, from that of z itself and that which comes through a norm."""

    dz: In[Activations] | None
    """[M, H], of z itself."""
    dropout: In[Dropout] | None
    dresidual: Activations | None
    """[M, H], both together; None where nothing comes through a norm: it is dz."""
    dupdate: Activations | None
    """[M, H]"""
    rounded: RoundedGradient | None
    """dupdate, rounded for the products that go back from there."""
    dupdate_sum: Floats | None
    """[H], dupdate summed over rows: the gradient of the bias that is in `update`."""

    @property
    def updated(self) -> bool:
        """Whether anything was added to the residual."""
        return self.dupdate is not None or self.rounded is not None

    @property
    def tensors(self) -> tuple:
        """Every activation."""
        return self.dz, self.dresidual, self.dupdate

    def compute(self, through: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Reference: what the written fields hold, `through` being what comes through a norm [M,
        H]."""
        dresidual = sum(one for one in (through, self.dz) if one is not None)
        if not self.updated:
            return dresidual, None, None, None, None
        dupdate = dropped(dresidual, self.dropout)
        rounded = self.rounded.encode(dupdate) if self.rounded is not None else (None, None)
        return dresidual, dupdate, *rounded, dupdate.sum(dim=0)

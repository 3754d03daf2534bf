"""Low-rank adapters of a product (LoRA, Hu et al. 2022): floats beside the product's codes.

    hidden = dropout(x) down^T;   y = base + hidden up^T

y has the epilogue of a product (lsq/ops/project.py). M rows, K inputs, N outputs, R columns of
`hidden`: the ranks of all adapters of a product. `up` includes the scaling of the adapters, and
zeros where an adapter adds nothing.
"""

from __future__ import annotations

import torch

from lsq.native import loader
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, Dropout, Rows, dropped


class AdapterInput(Operation):
    """The input of adapters: dropout(x) as floats."""

    x: In[Rows]  # [M, K]
    dropout: In[Dropout] | None
    values: Out[Floats]  # [M, K]

    rows = extent(0, "x.tensor")
    columns = extent(1, "x.tensor")

    def reference(self):
        x = self.x.floats.float() if self.x.coded is None else self.x.coded.decode()
        return {"values": dropped(x, self.dropout)}

    def gradient(self, builder) -> None:
        """Append nothing: Adapt, which reads `values`, appends the gradient of x."""


class AdapterInputGradient(Operation):
    """The gradient of x: that of `values` after the same dropout, plus `added`."""

    gradient: In[Floats]  # [M, K]
    dropout: In[Dropout] | None
    added: In[Activations] | None  # [M, K]
    dx: Out[Activations]  # [M, K]

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    def reference(self):
        dx = dropped(self.gradient, self.dropout)
        return {"dx": dx if self.added is None else dx + self.added}


class Adapt(Operation):
    """Adds adapters to a product and applies the epilogue to the sum."""

    x: In[Rows]  # [M, K], source of `values`.
    dropout: In[Dropout] | None
    values: In[Floats]  # [M, K]
    down: In[Floats]  # [R, K]
    up: In[Floats]  # [N, R]
    base: In[Activations]  # [M, N], the product.
    hidden: Out[Floats]  # [M, R]
    out: Out[Activations] | None  # [M, N]
    rounded: Out[Coded] | None  # [M, N]; N is a multiple of 8.
    nonlinearity: Out[Nonlinearity] | None

    rows = extent(0, "base")
    columns = extent(1, "base")

    def reference(self):
        hidden = self.values @ self.down.t()
        y = self.base + hidden @ self.up.t()
        return {"hidden": hidden, **epilogue(y, self.nonlinearity, self.rounded)}

    def cpu_scratch(self):
        return [] if self.out is not None else [(tuple(self.base.shape), torch.float32)]

    def cpu(self, *scratch):
        (sums,) = scratch or (self.out,)
        torch.mm(self.values, self.down.t(), out=self.hidden)
        torch.addmm(self.base, self.hidden, self.up.t(), out=sums)
        if self.nonlinearity is not None or self.rounded is not None:
            loader.call("lsq_end_adapted", self, sums)

    def gradient(self, builder) -> None:
        result = self.out if self.rounded is None else self.rounded.codes
        arrived, source = builder.gradient_of(result), self.x.tensor
        values = builder.like(self.values.name, self.values)
        builder.add(AdapterInput(x=self.x.bare(), dropout=self.dropout, values=values))
        wanted = builder.needs_gradient(source)
        dvalues = builder.like("d_" + self.values.name, self.values) if wanted else None
        builder.add(
            AdaptGradient(
                gradient=arrived,
                values=values,
                hidden=self.hidden,
                down=self.down,
                up=self.up,
                ddown=builder.parameter_gradient(self.down),
                dup=builder.parameter_gradient(self.up),
                dvalues=dvalues,
            )
        )
        builder.accumulate(self.base, arrived)
        if not wanted:
            return
        accumulated, dx = builder.accumulate_into(source)
        builder.add(
            AdapterInputGradient(gradient=dvalues, dropout=self.dropout, added=accumulated, dx=dx)
        )


class AdaptGradient(Operation):
    """The gradients of adapters and of `values`, their input."""

    gradient: In[Activations]  # [M, N], before the epilogue.
    values: In[Floats]  # [M, K]
    hidden: In[Floats]  # [M, R]
    down: In[Floats]  # [R, K]
    up: In[Floats]  # [N, R]
    ddown: Out[Floats] | None  # [R, K]
    dup: Out[Floats] | None  # [N, R]
    dvalues: Out[Floats] | None  # [M, K]

    def reference(self):
        gradient = self.gradient.float()
        dhidden = gradient @ self.up
        return {
            "ddown": dhidden.t() @ self.values,
            "dup": gradient.t() @ self.hidden,
            "dvalues": dhidden @ self.down,
        }

    def cpu_scratch(self):
        return [(tuple(self.hidden.shape), torch.float32)]

    def cpu(self, dhidden):
        torch.mm(self.gradient, self.up, out=dhidden)
        for a, b, out in (
            (dhidden.t(), self.values, self.ddown),
            (self.gradient.t(), self.hidden, self.dup),
            (dhidden, self.down, self.dvalues),
        ):
            if out is not None:
                torch.mm(a, b, out=out)

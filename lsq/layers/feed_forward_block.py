"""The feed-forward block as forward operations, with a gate or without; see lsq.layers.blocks.

M rows, H hidden, F feed-forward.
"""

from lsq.config import LayerConfig
from lsq.layers.blocks import Epilogue, bias_of, project
from lsq.layers.decoded import decode
from lsq.ops.gated import Gated
from lsq.ops.nonlinearity import Activation
from lsq.program.builder import Builder
from lsq.program.parameters import fan_in
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Rows


def feed_forward_block(
    builder: Builder, config: LayerConfig, x: Rows, prefix: str
) -> VirtualTensor:
    """Two projections with an activation between them, or three with a gate: normalised rows ->
    floats [M, H], before dropout.
    """
    inner = config.feed_forward
    end = Epilogue(
        name=prefix + "activation",
        clip=prefix + "activation_clip",
        activation=Activation[config.activation],
        dropout=config.activation_dropout,
    )
    middle = (
        gated(builder, config, x, prefix, end)
        if config.gated
        else project_feed_forward(builder, config, x, prefix + "fc1", inner, end)
    )
    fc2 = Epilogue(name=prefix + "fc2")
    return project_feed_forward(builder, config, middle, prefix + "fc2", config.hidden, fc2).floats


def gated(builder: Builder, config: LayerConfig, x: Rows, prefix: str, end: Epilogue) -> Rows:
    """dropout(activation(gate(x)) * up(x)) [M, F], with the activation, the dropout and the clip of
    `end`."""
    inner = config.feed_forward
    ends = (Epilogue(name=prefix + name, clip=f"{prefix}{name}_clip") for name in ("gate", "up"))
    gate, up = (
        project_feed_forward(builder, config, x, one.name, inner, one, joins=number > 0)
        for number, one in enumerate(ends)
    )
    shape = x.tensor.shape[0], inner
    if builder.quant.coded:
        rows = Rows(coded=builder.coded(end.name, shape, end.clip, by_row=True))
    else:
        rows = end.rows(builder, shape)
    builder.add(
        Gated(
            gate=gate,
            up=up,
            activation=end.activation,
            dropout=builder.dropout(end.dropout),
            out=rows.floats,
            rounded=rows.coded,
        )
    )
    return decode(builder, rows, end.clip)


def project_feed_forward(
    builder: Builder,
    config: LayerConfig,
    x: Rows,
    name: str,
    outputs: int,
    end: Epilogue,
    **options,
) -> Rows:
    """A projection of a feed-forward block; `name`: of its parameters. options: see
    blocks.project."""
    inputs = x.tensor.shape[1]
    return project(
        builder,
        x,
        name + "_weight",
        (outputs, inputs),
        end,
        bias=bias_of(config, name),
        bound=fan_in(inputs),
        bias_bound=fan_in(inputs),
        in_out=config.in_out,
        **options,
    )

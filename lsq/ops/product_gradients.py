"""The backward pass of a product: the gradients of its input and of its weight."""

from lsq.ops.fake_quantize import fake_gradient
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight


def append_gradients(
    builder, product, weight: Weight, upstream: tuple, *, undoes: bool = True, **end
) -> VirtualTensor | None:
    """Append both to a lsq.program.builder.Builder; where the gradient of the weight goes, if it or
    its clip has one.

    Args:
        builder: where to.
        product: has Rows x [M, K]: a Project or a Prediction.
        weight: [N, K], as products read it.
        upstream: its gradient as floats or as a RoundedGradient [M, P]; the other one is None.
        undoes: whether the rounding of x is undone; otherwise another product of x does that.
        end: fields of ProjectInputGradient: where its result goes, and what is done to it.
    """
    x, (floats, rounded) = product.x.coded, upstream
    if x is None:
        floats = fake_gradient(builder, floats, builder.quant.gradient_form(weight.values.name))
    common = {"gradient": rounded, "floats": floats}
    if builder.needs_gradient(product.x.tensor):
        if undoes:
            end |= {"x": x, "dclip": builder.parameter_gradient(product.x.clip)}
        builder.add(ProjectInputGradient(weight=weight.bare(), **common, **end))
    if not (builder.needs_gradient(weight.values) or builder.needs_gradient(weight.clip)):
        return None
    if rounded is not None:
        common |= {"key": builder.key, "subsequence": builder.next_subsequence()}
    dweight = builder.parameter_gradient(weight.values)
    if dweight is None:  # its clip's alone
        dweight = builder.like("d_" + weight.values.name, weight.values)
    builder.add(
        ProjectWeightGradient(
            x=product.x.bare(),
            weight=weight,
            learned_step=builder.quant.clip_gradient == "lsq",
            dweight=dweight,
            dclip=builder.parameter_gradient(weight.clip),
            **common,
        )
    )
    return dweight

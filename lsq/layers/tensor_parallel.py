"""Linear layers that torch's `parallelize_module` has split: each process runs a layer of its part.

ColwiseParallel leaves a process some outputs and all inputs, RowwiseParallel some inputs and all
outputs, so that its result is a summand. DTensor moves activations and gradients between processes.
Clips follow activations: after each training pass they become the largest of all processes, as if
the layer were whole. A part of inputs rounds its weight under the largest magnitudes of the part.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lsq.config import DIMENSION_MULTIPLE
from lsq.dist.agreement import least_of_all
from lsq.layers.linear import Projection, QuantizedLinear
from lsq.layers.schedule import recomputing
from lsq.run.shards import local, part_of

SUMMAND = (Partial(),)
WHOLE = (Replicate(),)


def run_part(layer: Projection, x: DTensor) -> DTensor:
    """Run this process's part of `layer`. Raises ValueError: the layer is split in another way, or
    its parts or clips cannot be trained."""
    of_outputs = _split_by_outputs(layer, x)
    part = layer.weight_state.part
    if part is None:
        part = layer.weight_state.part = _make_part(layer, of_outputs)
    if part.training != layer.training:
        part.train(layer.training)
    bias = layer.bias
    part._parameters["weight"] = layer.weight.to_local()
    if bias is not None and of_outputs:
        part._parameters["bias"] = bias.to_local()
    y = part(x.to_local(grad_placements=SUMMAND if of_outputs else None))
    if layer.training and not recomputing():
        _share_clips(layer, part)
    if of_outputs:
        return DTensor.from_local(y, x.device_mesh, (Shard(y.dim() - 1),), run_check=False)
    if bias is not None:
        whole = bias.redistribute(placements=WHOLE).to_local(grad_placements=SUMMAND)
        y = y + whole.to(y.dtype) * (x.device_mesh.get_local_rank() == 0)
    return DTensor.from_local(y, x.device_mesh, SUMMAND, run_check=False)


def _split_by_outputs(layer: Projection, x: DTensor) -> bool:
    """Return whether processes share the outputs of a layer, not its inputs."""
    weight = layer.weight
    placements = getattr(weight, "placements", ())
    if len(placements) == 1 and weight.device_mesh == x.device_mesh:
        if placements[0].is_shard(0) and x.placements[0].is_replicate():
            return True
        if placements[0].is_shard(1) and x.placements[0].is_shard(x.dim() - 1):
            return False
    raise ValueError(
        f"a {type(layer).__name__} with weight {_described(weight)} got an input"
        f" {_described(x)}; tensor parallelism takes ColwiseParallel and RowwiseParallel of"
        " torch.distributed.tensor.parallel over a mesh of one dimension"
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} as {getattr(tensor, 'placements', 'a whole tensor')}"


def _make_part(layer: Projection, of_outputs: bool) -> QuantizedLinear:
    kind, weight = type(layer).__name__, local(layer.weight)
    if layer.quant.learned or layer.weight_masks is not None:
        what = "learn" if layer.quant.learned else "belong to a sparse weight"
        raise ValueError(
            f"the clips of this {kind} {what}, which tensor parallelism does not train; convert the"
            ' model with QuantConfig(clips="absmax") and no sparsity, or leave this layer out of'
            " parallelize_module"
        )
    outputs, inputs = weight.shape
    if outputs % DIMENSION_MULTIPLE or inputs % DIMENSION_MULTIPLE:
        raise ValueError(
            f"a process has {outputs} outputs and {inputs} inputs of a {kind}"
            f" {list(layer.weight.shape)}; int8 products need multiples of {DIMENSION_MULTIPLE}:"
            " take fewer processes, or leave the layer out of lsq.convert with `skip`"
        )
    part = nn.Linear(inputs, outputs, bias=layer.bias is not None and of_outputs, device="meta")
    part._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)
    part.__class__ = QuantizedLinear
    part.begin(layer.quant)
    part.declare(partial(part._program, 1), measure=False)
    for name, clip in part.clips().items():
        given = layer.own_parameter(name)
        rows = of_outputs and name == "weight_clip" and len(given) > 1
        given = given.redistribute(placements=(Shard(0),) if rows else WHOLE)
        clip.copy_(given.to_local())
    part.schedule, part.followed, part.backend = layer.schedule, layer.followed, layer.backend
    return part


@torch.no_grad()
def _share_clips(layer: Projection, part: QuantizedLinear) -> None:
    """Set the clips of the layer, and those of activations in the part, to the largest of all
    processes; clips of rows that only this process has stay."""
    part.follow_clips()
    clips = {name: (layer.own_parameter(name), clip) for name, clip in part.clips().items()}
    own = {name for name, (whole, clip) in clips.items() if len(clip) != len(whole)}
    shared = [clip.data for name, (_, clip) in clips.items() if name not in own]
    mesh = layer.weight.device_mesh
    largest = -least_of_all(-torch.cat(shared), mesh.get_group())
    torch._foreach_copy_(shared, list(largest.split([len(one) for one in shared])))
    for name, (whole, clip) in clips.items():
        local(whole).copy_(clip if name in own else part_of(clip.data, whole))

"""int8 gradients for FSDP2: a reduce-scatter that sends codes.

Under FSDP2 the worker that owns a shard keeps its gradient, so one hop is enough: an all-to-all of
packed messages, then a float32 sum in the order of ranks. Values are rounded once, before they are
sent; values of small tensors are not rounded.
"""

import sys
import warnings

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from lsq.config import require_model
from lsq.dist.collectives import all_to_all, small_positions, take_out
from lsq.dist.config import BLOCK, GradientConfig
from lsq.dist.hooks import DTYPES
from lsq.ops.gradient_messages import (
    SHARD_MULTIPLE,
    MessageLayout,
    Messages,
    PackGradients,
    UnpackGradients,
)
from lsq.run import backends


def compress_reduce_scatter(
    model: nn.Module, config: GradientConfig | None = None
) -> "Int8ReduceScatter":
    """Let every FSDP2 module in `model` reduce its gradients in int8.

    It calls FSDPModule.set_custom_reduce_scatter on all of them; parameters are gathered as before,
    those of lsq.train_codes as codes. Call it after `fully_shard` and before the first backward
    pass, in every process.

    Args:
        model: has at least one module on which `fully_shard` was called.
        config: its mode is "int8"; None: GradientConfig(mode="int8").

    Raises:
        ValueError: the mode is another, or there is no such module.
    """
    config = config or GradientConfig(mode="int8")
    if config.mode != "int8":
        raise ValueError(
            f"FSDP2 was to use mode {config.mode}; it takes mode int8, or its own reduce_dtype"
        )
    require_model(model)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            "the model holds no FSDP2 module; call torch.distributed.fsdp.fully_shard on it first"
        )
    reduce_scatter = Int8ReduceScatter()
    for module in modules:
        module.set_custom_reduce_scatter(reduce_scatter)
    return reduce_scatter


class Int8ReduceScatter:
    """A reduce-scatter in int8 for FSDPModule.set_custom_reduce_scatter."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for FSDP2's own buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Write the sum or mean of all workers' values for this worker to `output_tensor` [n].
        `input_tensor` [N * n] has a part for each of the N workers.

        On a GPU it is ordered on the current stream, as FSDP2 requires. Raises ValueError: `op` is
        neither SUM nor AVG, the dtype cannot be compressed, or async_op is set.
        """
        workers = group.size()
        factors = {ReduceOp.SUM: 1.0, ReduceOp.AVG: 1.0 / workers}
        if op not in factors or async_op:
            raise ValueError(
                "a reduce-scatter in int8 was asked for"
                f" {op}{' with async_op' if async_op else ''}; it does SUM and AVG at once: call"
                " set_force_sum_reduction_for_comms(True) on the module"
            )
        if input_tensor.dtype not in DTYPES:
            raise ValueError(
                f"gradients are {input_tensor.dtype}, but int8 takes {', '.join(map(str, DTYPES))};"
                " set reduce_dtype in MixedPrecisionPolicy"
            )
        values = output_tensor.numel()
        length = -(-values // SHARD_MULTIPLE) * SHARD_MULTIPLE
        layout = MessageLayout(values=workers * length, shards=workers, length=length, block=BLOCK)
        x = input_tensor.view(workers, values)
        small = _small_around(workers, x.device)
        floats = None if small is None else take_out(x, small)
        if length > values:
            x = functional.pad(x, (0, length - values))
        sent = torch.empty(workers, layout.message_bytes, dtype=torch.uint8, device=x.device)
        backends.run(PackGradients(x=x.view(1, -1), messages=Messages(layout=layout, data=sent)))
        received = torch.empty_like(sent)
        all_to_all(received, sent, group).wait()
        own = MessageLayout(values=values, shards=1, length=length, block=BLOCK)
        messages = Messages(layout=own, data=received[:, None])
        backends.run(
            UnpackGradients(messages=messages, factor=factors[op], x=output_tensor.view(-1))
        )
        if floats is not None:
            terms = torch.empty_like(floats)
            all_to_all(terms, floats, group).wait()
            output_tensor.view(-1).index_copy_(
                0, small, (terms.sum(0) * factors[op]).to(output_tensor.dtype)
            )


def _small_around(workers: int, device: torch.device) -> Tensor | None:
    """Return the positions of small tensors in each worker's part of the reduced tensor; None:
    there are none.

    FSDP2 does not say which gradients it joins: of all parameters that have one, each padded to a
    multiple of `workers` rows. The function that calls the reduce-scatter knows them.
    """
    known = sys._getframe(2).f_locals
    if not {"fsdp_params", "padded_unsharded_sizes"} <= known.keys():
        warnings.warn(
            "nothing tells which gradients this reduce-scatter is given: those of small tensors,"
            " such as clips, are rounded with their neighbours",
            stacklevel=3,
        )
        return None
    pairs = zip(known["fsdp_params"], known["padded_unsharded_sizes"], strict=True)
    tensors = [(one.sharded_param.numel(), padded.numel() // workers) for one, padded in pairs]
    return small_positions(tensors, device)

"""DDP's communication hook that averages gradients by a GradientConfig."""

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lsq.config import require_model
from lsq.dist import roll_call, trial
from lsq.dist.agreement import gather_text, require_same
from lsq.dist.collectives import Scratch, average, small_positions, take_out
from lsq.dist.config import (
    COMPRESSED,
    GCQ_ADVISED_WORKERS,
    GradientConfig,
    Topology,
    find_topology,
    gcq_levels,
)
from lsq.dist.executor import SideStream, WorkerThread
from lsq.dist.gcq import GCQ
from lsq.dist.two_hop import CODECS, TwoHop
from lsq.run.frames import Bucket

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
"""dtypes of gradients that can be compressed."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Type of device -> the backend that must carry codes; other devices may use any."""
PYTORCH_HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "float": default_hooks.allreduce_hook,
}
"""Modes -> PyTorch's own hooks; "float" stands for modes that have nothing to compress."""
LEAN, LEAN_DEVICES = ("lean", "lean5"), ("cpu",)
"""Modes of the codec `lean`, and the types of devices that have it."""
NODE_MODES = ("auto", "int8_hier", *LEAN)
"""Modes that depend on which workers share a node."""
LANES = 2
"""Buckets that are in flight on a CPU: one is packed while another travels."""


class Lane:
    """Exchanges buckets one after another, by groups and memory of its own.

    `groups`: the means over them, one after another, give the mean of all workers.
    """

    def __init__(
        self,
        average: GCQ | TwoHop,
        groups: list[ProcessGroup],
        executor: WorkerThread | SideStream,
    ):
        self.average, self.groups, self.executor = average, groups, executor

    def submit(self, buffer: Tensor, small: Tensor | None) -> Future:
        """Return the future of a bucket's mean, in its own buffer."""
        return self.executor.submit(lambda: self._mean(buffer, small))

    def _mean(self, buffer: Tensor, small: Tensor | None) -> Tensor:
        values = None if small is None else take_out(buffer, small)
        self.average.average(buffer)
        if values is not None:
            for group in self.groups:
                average([values], group)
            buffer.index_copy_(0, small, values.to(buffer.dtype))
        return buffer


class GradientCompression:
    """A communication hook and its mode: never "auto", and "float" with one worker."""

    mode: str
    """One of COMPRESSED, "bf16", "fp16" or "float": gradients travel as they are."""
    topology: Topology

    def __init__(self, mode: str, topology: Topology, group: ProcessGroup):
        self.mode, self.topology, self.group = mode, topology, group
        self._lanes: list[Lane] = []
        """Buckets take turns. The order of each lane's collectives is the same in all workers."""
        self._buckets: defaultdict[int, Bucket] | None = None
        """Buckets that the gradients of lsq's layers are written to, after the first exchange."""
        self._small: dict[int, tuple[torch.UntypedStorage, Tensor | None]] = {}
        """Number of a bucket -> its memory, and the positions of small tensors in it."""

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the future of a bucket's mean, which is written to the bucket's own buffer."""
        buffer = bucket.buffer()
        if self._buckets is not None:
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._buckets[bucket.index()].exchanged(buffer, pairs)
        if not self._lanes:
            return PYTORCH_HOOKS[self.mode](self.group, bucket)
        if buffer.dtype not in DTYPES or buffer.is_sparse:
            raise _unfit(
                f"a bucket is {'sparse ' if buffer.is_sparse else ''}{buffer.dtype}", self.mode
            )
        if buffer.numel() == 0:  # parameters without values, the only ones of their dtype
            done: Future = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
            done.set_result(buffer)
            return done
        lane = self._lanes[bucket.index() % len(self._lanes)]
        return lane.submit(buffer, self._small_in(bucket))

    def _small_in(self, bucket: GradBucket) -> Tensor | None:
        """Return the positions of small tensors in a bucket, found anew when DDP changes the
        bucket."""
        buffer, index = bucket.buffer(), bucket.index()
        storage = buffer.untyped_storage()
        if index not in self._small or self._small[index][0]._cdata != storage._cdata:
            sizes = [gradient.numel() for gradient in bucket.gradients()]
            positions = small_positions(zip(sizes, sizes, strict=True), buffer.device)
            self._small[index] = storage, positions
        return self._small[index][1]

    def _prepare(self, config: GradientConfig, device: torch.device) -> None:
        """Make lanes. Every worker must call it, with the same configuration."""
        on_cpu = device.type == "cpu"
        # all processes must register, and here all are in the group
        if on_cpu and self.topology.world_size == distributed.get_world_size():
            roll_call.register()
        for _ in range(LANES if on_cpu else 1):
            groups = own_groups(self.mode, self.topology, _maker(self.group, config, device))
            executor = WorkerThread(roll_call.name_the_lost) if on_cpu else SideStream(device)
            self._lanes.append(Lane(exchange_of(self.mode, groups, device), groups, executor))


def own_groups(
    mode: str, topology: Topology, make: Callable[[list[list[int]]], ProcessGroup]
) -> list[ProcessGroup]:
    """Return the groups that exchange codes: all workers, or first the neighbours on a node and
    then the counterparts on all nodes. `make`: makes this process's group of those listed."""
    if mode in ("gcq", "int8") or 1 in (topology.node_size, topology.nodes):
        return [make([list(range(topology.world_size))])]
    return [make(topology.all_neighbours), make(topology.all_counterparts)]


def exchange_of(mode: str, groups: list[ProcessGroup], device: torch.device) -> GCQ | TwoHop:
    """Return what averages buckets in one of the modes COMPRESSED."""
    *neighbours, group = groups
    scratch = Scratch(device)
    return (
        GCQ(group, scratch)
        if mode == "gcq"
        else TwoHop(group, scratch, *neighbours, codec=CODECS[mode])
    )


def compress_gradients(
    model: DistributedDataParallel, config: GradientConfig | None = None
) -> GradientCompression:
    """Let a DDP model average its gradients by `config`, in place of DDP's all-reduce.

    Call it once in every process, before the first forward pass. Every worker gets the same bits:
    the mean of all, or a non-finite value where a worker had one. The backward pass goes on
    meanwhile. With one worker nothing is registered.

    Args:
        model: the wrapped model, with all parameters on one device.
        config: the same in all processes; None: GradientConfig().

    Raises:
        ValueError: the configuration does not fit the workers, the model or the backend, or differs
            between processes; or the model already has a communication hook.
        TypeError: `model` is no DistributedDataParallel.
    """
    config = config or GradientConfig()
    require_model(model)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"compress_gradients was given a {type(model).__name__}; wrap it in"
            " DistributedDataParallel"
        )
    group = model.process_group
    device = _device(model)
    topology = _topology(config, group, device)
    if topology.world_size == 1:
        logger.info(
            "there is one worker: gradients are not exchanged, and mode %s has nothing to do",
            config.mode,
        )
        return GradientCompression("float", topology, group)
    settings = {**asdict(config), "node_size": topology.node_size}
    require_same("the configuration of gradients", settings, group, device)
    mode = _mode(config, topology)
    if mode == "auto":
        mode = _tried(model, config, topology, group, device)
    if mode in COMPRESSED:
        _check_fit(model, mode, group, device)
    compression = GradientCompression(mode, topology, group)
    try:
        model.register_comm_hook(compression, GradientCompression.exchange)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise ValueError(
            "this model has a communication hook already, and DDP takes one: call"
            " compress_gradients once, do not register another, and leave out mixed_precision of"
            " DDP and fairseq's --ddp-comm-hook"
        ) from error
    if model.gradient_as_bucket_view:
        compression._buckets = defaultdict(Bucket)
    if mode in COMPRESSED:
        compression._prepare(config, device)
    return compression


def _maker(
    whole: ProcessGroup, config: GradientConfig, device: torch.device
) -> Callable[[list[list[int]]], ProcessGroup]:
    timeout, backend = timedelta(seconds=config.timeout_s), backend_of(whole, device)
    return lambda parts: _own_group(whole, parts, timeout, backend)


def _own_group(
    whole: ProcessGroup, parts: list[list[int]], timeout: timedelta, backend: str | None
) -> ProcessGroup:
    """Return a new group of the part of `whole` that this process belongs to. Every member must
    call it.

    With use_local_synchronization, PyTorch names a group by the number of groups that its process
    knows, which may differ. So if `whole` has all processes, every process makes all groups.
    """
    ranks = distributed.get_process_group_ranks(whole)
    everybody, own = len(ranks) == distributed.get_world_size(), None
    for positions in parts:
        here = whole.rank() in positions
        if everybody or here:
            made = distributed.new_group(
                [ranks[position] for position in positions],
                timeout=timeout,
                backend=backend,
                use_local_synchronization=not everybody,
            )
            own = made if here else own
    return own


def _topology(config: GradientConfig, group: ProcessGroup, device: torch.device) -> Topology:
    """Return the workers' nodes; one node for modes that do not depend on nodes."""
    if config.mode not in NODE_MODES:
        return Topology(world_size=group.size(), rank=group.rank(), node_size=group.size())
    # torchrun's node size is for all its processes, not for a smaller group.
    environment = os.environ if group.size() == distributed.get_world_size() else {}
    return find_topology(
        group.size(),
        group.rank(),
        config.node_size,
        lambda: gather_text(socket.gethostname(), group, device),
        environment,
    )


def _mode(config: GradientConfig, topology: Topology) -> str:
    """Return the mode that a configuration leads to, perhaps "auto" still; rank 0 logs why if it is
    not obvious."""
    workers, mode = topology.world_size, config.mode
    if mode == "gcq":
        levels = gcq_levels(workers)
        if workers > GCQ_ADVISED_WORKERS:
            _say(
                topology,
                logging.WARNING,
                f"mode gcq leaves each of {workers} workers codes of -{levels} to {levels}; above "
                f"{GCQ_ADVISED_WORKERS} workers, int8 and int8_hier are far more exact",
            )
    elif mode == "int8_hier" and topology.nodes == 1:
        _say(
            topology,
            logging.WARNING,
            f"mode {mode} compresses between nodes, and there is one: floats are averaged",
        )
        return "float"
    return mode


def _tried(
    model: DistributedDataParallel,
    config: GradientConfig,
    topology: Topology,
    group: ProcessGroup,
    device: torch.device,
) -> str:
    """Return the mode that exchanges a bucket fastest; rank 0 logs the times."""

    def half(bucket: Tensor) -> None:
        rounded = bucket.bfloat16()
        distributed.all_reduce(rounded, group=group)
        bucket.copy_(rounded)

    ways = {"float": lambda bucket: distributed.all_reduce(bucket, group=group), "bf16": half}
    int8 = "int8" if 1 in (topology.node_size, topology.nodes) else "int8_hier"
    try:
        _check_fit(model, int8, group, device)
    except ValueError as error:
        unfit, groups = f"; no codes: {error}", []
    else:
        unfit, groups = "", own_groups(int8, topology, _maker(group, config, device))
        coded = (int8, "lean") if device.type in LEAN_DEVICES else (int8,)
        ways |= {mode: exchange_of(mode, groups, device).average for mode in coded}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    seconds = trial.seconds_of(ways, group, device, widest)
    for own in groups:
        distributed.destroy_process_group(own)
    mode = trial.choose(seconds)
    times = ", ".join(f"{1e3 * taken:.1f} ms by {name}" for name, taken in seconds.items())
    _say(
        topology,
        logging.INFO,
        f"gradients: auto chose {mode}: {trial.VALUES} values took {times}; a less exact mode must"
        f" save {100 * (1 - trial.WORTH):.0f} %{unfit}",
    )
    return mode


def _say(topology: Topology, level: int, text: str) -> None:
    if topology.rank == 0:
        logger.log(level, text)


def _device(model: DistributedDataParallel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) != 1:
        raise ValueError(
            f"the model's parameters lie on {len(devices)} devices"
            f" ({', '.join(sorted(map(str, devices)))}); gradients can be compressed on one device"
            " a process"
        )
    return devices.pop()


def _check_fit(
    model: DistributedDataParallel, mode: str, group: ProcessGroup, device: torch.device
) -> None:
    """Raise ValueError for gradients that cannot be coded, or a backend that cannot send codes."""
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise _unfit(f"parameter {name} is {parameter.dtype}", mode)
    if mode in LEAN and device.type not in LEAN_DEVICES:
        raise ValueError(
            f"gradients are on {device.type}, but mode {mode} runs on {' and '.join(LEAN_DEVICES)}"
            " alone; choose int8, int8_hier or bf16"
        )
    backend = backend_of(group, device)
    if backend is None or backend != BACKENDS.get(device.type, backend):
        known = " and ".join(f"{device} by {backend}" for device, backend in BACKENDS.items())
        raise ValueError(
            f"gradients are on {device.type} and their process group uses {backend}, but mode"
            f" {mode} sends those of {known}; initialise the process group with that backend, or"
            " choose mode bf16"
        )


def _unfit(what: str, mode: str) -> ValueError:
    return ValueError(
        f"{what}, but mode {mode} takes dense gradients of {', '.join(map(str, DTYPES))}; convert"
        " the model, or choose mode bf16"
    )


def backend_of(group: ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the backend that carries tensors of `device` in a group, if any."""
    pairs = (pair.partition(":") for pair in distributed.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in pairs}.get(device.type)

"""A process group for the test device that behaves as NCCL's: it takes no other tensors, works on a
stream of its own, and who waits for its work lets his stream wait, not the host. gloo carries the
bytes.
"""

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.distributed import ProcessGroup
from torch.futures import Future

from tests.device import standin

NAME = "standin_ccl"


class Done:
    """Work that is."""

    def wait(self):
        pass


class StandinGroup(ProcessGroup):
    """The group of one process."""

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self._store = store
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    def _work(self, tensors: list[Tensor], results, call):
        """The work that `call`, given the same memory as tensors of the CPU, makes of gloo."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or next(iter(devices)).type != standin.NAME:
            raise RuntimeError(
                f"{NAME} was given tensors on {devices}; it takes those of one device"
                f" {standin.NAME}"
            )
        device = devices.pop()
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            call(*map(standin.on_host, tensors)).wait()
            for tensor in tensors:
                tensor.data.mul_(1)  # the driver does not see what gloo touches
                tensor.record_stream(stream)
            future = Future(devices=[device])
            future.set_result(results)
        return _create_work_from_future(future)

    def allreduce(self, tensors, options):
        return self._work(
            tensors, tensors, lambda *given: self._gloo.allreduce(list(given), options)
        )

    def broadcast(self, tensors, options):
        return self._work(
            tensors, tensors, lambda *given: self._gloo.broadcast(list(given), options)
        )

    def allgather(self, results, tensors, options=None):
        (outs,), (own,) = results, tensors
        return self._work(
            [*outs, own], results, lambda *given: self._gloo.allgather([given[:-1]], [given[-1]])
        )

    def all_gather_single(self, out, own, options=None):
        return self._work([out, own], out, lambda to, of: self._gloo._allgather_base(to, of))

    def reduce_scatter_single(self, out, given, options):
        average = options.reduceOp == distributed.ReduceOp.AVG
        options.reduceOp = distributed.ReduceOp.SUM if average else options.reduceOp

        def call(to, of):
            self._gloo._reduce_scatter_base(to, of, options).wait()
            to.mul_(1 / self.size() if average else 1)
            return Done()  # gloo's would write the sums once more

        return self._work([out, given], out, call)

    def all_to_all_single(self, out, given, received, sent, options=None):
        return self._work(
            [out, given], out, lambda to, of: self._gloo.alltoall_base(to, of, received, sent)
        )

    # Before PyTorch 2.13
    _allgather_base, alltoall_base, _reduce_scatter_base = (
        all_gather_single,
        all_to_all_single,
        reduce_scatter_single,
    )

    def barrier(self, options=None):
        return self.allreduce(
            [torch.zeros(1, device=standin.PLACE)], distributed.AllreduceOptions()
        )

    @property
    def _device_types(self):
        return [torch.device(standin.NAME)]

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def get_group_store(self):
        return self._store

    def size(self):
        return self._gloo.size()

    def rank(self):
        return self._gloo.rank()

    def getBackendName(self):
        return NAME


def register() -> None:
    """Load the device, and make its groups known to torch.distributed."""
    standin.load()
    distributed.Backend.register_backend(NAME, StandinGroup, devices=[standin.NAME])

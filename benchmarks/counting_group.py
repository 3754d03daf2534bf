"""A process group of threads that counts the bytes between its workers, collective by collective.

Each worker is a thread of this process; what it sends goes through a queue and is counted. The
algorithms are those of
NCCL and gloo for large tensors: all-reduce in a ring (each of N pieces is added up on its way
round, then passed round once more), all-to-all directly, all-gather in a ring, or directly if asked
for.
"""

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, distributed
from torch.futures import Future

SECONDS = 60
"""A worker that waits longer for a message gives up."""


class Wires:
    """The connections between all workers."""

    def __init__(self):
        self.bytes: Counter[tuple[int, int]] = Counter()
        """(sender, receiver) -> bytes that went over."""
        self._lock = threading.Lock()
        self._waiting: defaultdict[tuple[int, int], queue.SimpleQueue] = defaultdict(
            queue.SimpleQueue
        )

    def send(self, sender: int, receiver: int, tensor: Tensor) -> None:
        """Count a tensor's bytes and leave a copy of it for the receiver."""
        with self._lock:
            self.bytes[sender, receiver] += tensor.numel() * tensor.element_size()
            waiting = self._waiting[sender, receiver]
        waiting.put(tensor.clone())

    def receive(self, sender: int, receiver: int, tensor: Tensor) -> None:
        """Wait for the sender's next tensor and write it to `tensor`."""
        with self._lock:
            waiting = self._waiting[sender, receiver]
        tensor.copy_(waiting.get(timeout=SECONDS))


class Done:
    """What a collective returns: it is done already."""

    def __init__(self, result: list[Tensor]):
        self._result = result

    def wait(self) -> bool:
        """Nothing to wait for."""
        return True

    def get_future(self) -> Future:
        """A future of the result that is there."""
        future: Future = Future()
        future.set_result(self._result)
        return future


class CountingGroup(distributed.ProcessGroup):
    """One worker's view of a group.

    Args:
        wires: between the workers, shared by all groups.
        ranks: of the group's workers.
        rank: of this worker, one of them.
        gather: "ring" or "direct".
    """

    def __init__(self, wires: Wires, ranks: Sequence[int], rank: int, gather: str = "ring"):
        super().__init__(list(ranks).index(rank), len(ranks))
        self.wires, self.ranks, self.own, self.gather = wires, list(ranks), rank, gather

    def allreduce(self, tensors: list[Tensor], options) -> Done:
        """Ring: N - 1 steps that add up (or take the larger), N - 1 that pass on."""
        combine = torch.maximum if options.reduceOp == distributed.ReduceOp.MAX else torch.add
        place, size = self.rank(), self.size()
        pieces = tensors[0].view(-1).tensor_split(size)
        for step in range(size - 1):
            self._send(place + 1, pieces[(place - step) % size])
            piece = pieces[(place - step - 1) % size]
            received = torch.empty_like(piece)
            self._receive(place - 1, received)
            piece.copy_(combine(piece, received))
        self._pass_round(pieces, first=place + 1)
        return Done(tensors)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, received: list[int], sent: list[int], *options
    ) -> Done:
        """Every worker to every other."""
        incoming = out.split(received or out.numel() // self.size())
        outgoing = given.split(sent or given.numel() // self.size())
        incoming[self.rank()].copy_(outgoing[self.rank()])
        self._exchange(outgoing, incoming)
        return Done([out])

    def all_gather_single(self, out: Tensor, own: Tensor, *options) -> Done:
        """Ring: N - 1 steps that pass on; or every worker to every other."""
        pieces = out.chunk(self.size())
        pieces[self.rank()].copy_(own)
        if self.gather == "direct":
            self._exchange([own] * self.size(), pieces)
        else:
            self._pass_round(pieces, first=self.rank())
        return Done([out])

    alltoall_base = all_to_all_single  # their names before PyTorch 2.13
    _allgather_base = all_gather_single

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        others = [place for place in range(self.size()) if place != self.rank()]
        for place in others:
            self._send(place, outgoing[place])
        for place in others:
            self._receive(place, incoming[place])

    def _pass_round(self, pieces: Sequence[Tensor], first: int) -> None:
        """Every worker gets all pieces; it begins with its complete one, number `first`."""
        place, size = self.rank(), self.size()
        for step in range(size - 1):
            self._send(place + 1, pieces[(first - step) % size])
            self._receive(place - 1, pieces[(first - step - 1) % size])

    def _send(self, place: int, tensor: Tensor) -> None:
        self.wires.send(self.own, self.ranks[place % self.size()], tensor)

    def _receive(self, place: int, tensor: Tensor) -> None:
        self.wires.receive(self.ranks[place % self.size()], self.own, tensor)


def run(workers: int, work: Callable[[int], object]) -> list:
    """[work(rank) for each rank], all at the same time, each in a thread."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))

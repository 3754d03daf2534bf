"""The store of a training that torchrun restarts, without entries of earlier attempts.

torchrun's agents may keep one store over all restarts (pytorch#135712). Then processes that meet by
`env://` find the addresses and answers of dead processes. `init_method="lsq://"` meets in a new
part of the store. The number of restarts cannot name the part, since each machine's agent counts
its own.
"""

import time
import uuid

from torch import distributed

PERIOD_S = 0.05
"""Seconds between two looks for the answer of rank 0."""
METHOD = "lsq://"
"""`init_method` for processes that torchrun has started; import this module first."""


def own_part(store: distributed.Store, rank: int, size: int) -> distributed.Store:
    """Return a part of `store` that only the processes of this attempt use. Every process calls it.

    Rank 0 stores a new name. Every other rank asks under the name that it finds, and takes it once
    rank 0 has answered: nobody answers under the names of earlier attempts. Raises TimeoutError:
    rank 0 does not answer within the store's timeout.
    """
    store = distributed.PrefixStore("lsq/attempts", store)
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("name", name)
        for other in range(1, size):
            store.set(store.get(f"{name}/{other}").decode(), "")
        return distributed.PrefixStore(name, store)
    question, deadline = uuid.uuid4().hex, time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", question)
        time.sleep(PERIOD_S)
        if store.check([question]):
            return distributed.PrefixStore(name, store)
    raise TimeoutError(
        f"rank 0 did not come to the store of this training; rank {rank} has waited for it"
    )


def _meet(url: str, **options):
    store, rank, size = next(distributed.rendezvous("env://", **options))
    yield own_part(store, rank, size), rank, size


distributed.register_rendezvous_handler("lsq", _meet)

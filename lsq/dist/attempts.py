"""The store of a training that torchrun starts again, without what earlier attempts have left.

torchrun's agents may keep one store over all restarts (pytorch#135712): processes that meet by
`env://` find addresses and answers of dead ones. `init_method="lsq://"` meets in a part of the
store that is new. The number of restarts cannot name it: each machine's agent counts its own.
"""

import time
import uuid

from torch import distributed

PERIOD_S = 0.05
"""How often a process looks whether rank 0 has answered, in seconds."""
METHOD = "lsq://"
"""For `init_process_group` of a process that torchrun has started, once this module is imported."""


def own_part(store: distributed.Store, rank: int, size: int) -> distributed.Store:
    """The part of `store` that the processes of this attempt alone know; every process calls it.
    Rank 0 names it. Others ask under a name and take it once it is answered: nobody answers
    under an earlier one. Raises TimeoutError: rank 0 does not answer within the timeout of the
    store."""
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

"""Attention of one query in each row to cached codes of keys and values, for decoding.

    context = softmax(q k^T / sqrt(width)) v

A list of positions in the cache gives the keys of a row. Hypotheses share the keys of a common
beginning, a continued hypothesis copies its list, and the rows of a sentence share the list of its
source. R rows, N heads, D columns of a head, H = N * D, L lists, at most C positions in a list.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Codes, Floats, In, Indices, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Coded


class CachedAttention(Operation):
    """Context rows [R, H]; a row with an empty list gets 0."""

    queries: In[Coded]  # [R, H], or with `appends` [R, 3H]: queries, keys and values.
    cache: Out[Codes]  # [positions, 2H]: keys and values. Read, and written if `appends`.
    cache_scale: In[Floats]  # [1]
    lists: In[Indices]  # [L, C], positions in the cache, in any order.
    lengths: In[Indices]  # Length of each list: [L], or more.
    owned: In[Indices]  # [R], the list of each row.
    appends: bool
    """Each row first writes its key and value at the last position of its own list."""
    heads: int  # N.
    context: Out[Coded]  # [R, H], without `clipped` and `error`.

    rows = extent(0, "queries.codes")
    query_columns = extent(1, "queries.codes")
    columns = extent(1, "context.codes")  # H.
    capacity = extent(1, "lists")  # C.

    @size
    def width(self) -> int:
        """D."""
        return self.columns // self.heads

    def limits(self):
        return {
            "lists": self.cache.shape[0],
            "lengths": self.capacity + 1,
            "owned": self.lists.shape[0],
        }

    def reference(self):
        hidden, cache = self.columns, self.cache.clone()
        lists = [self.lists[number, : self.lengths[number]] for number in self.owned.tolist()]
        if self.appends:
            for row, positions in enumerate(lists):
                if len(positions):
                    cache[positions[-1]] = self.queries.codes[row, hidden:]
        context = torch.zeros(self.rows, hidden, dtype=torch.float32)
        share = torch.tensor(self.width**-0.5, dtype=torch.float32)
        for row, positions in enumerate(lists):
            query = self.queries.codes[row, :hidden].view(self.heads, 1, self.width).float()
            rows = cache[positions].float().view(-1, 2, self.heads, self.width)
            keys, values = rows.permute(1, 2, 0, 3)
            scores = query @ keys.transpose(1, 2) * (self.queries.scale * self.cache_scale * share)
            if len(positions):
                context[row] = (scores.softmax(dim=2) @ (values * self.cache_scale)).flatten()
        return {"cache": cache, "context": self.context.encode(context)}

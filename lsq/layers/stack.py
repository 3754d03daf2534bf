"""A stack of embedding, layers and final norm, run on packed tokens or one word at a time."""

import torch

from lsq.layers.decoding import State, reorder
from lsq.layers.packing import Packing


class Stack:
    """For modules that have `embed_tokens` (an Embedding), `layers` and `layer_norm` (None: there
    is no final norm).

    M rows, B sentences, T time, H hidden. `memory`: what the layers' own `rows` and `step` take
    beside x, if anything.
    """

    def rows(self, tokens: torch.Tensor, packing: Packing, *memory) -> list[torch.Tensor]:
        """tokens int64 [B, T] -> packed rows float32 [M, H]: the input of the first layer, every
        layer's output, and the last one normalised.
        """
        states = [self.embedded(tokens, packing, 0)]
        for layer in self.layers:
            states.append(layer.rows(states[-1], packing, *memory))
        return [*states, self._normalised(states[-1])]

    def last_rows(self, tokens: torch.Tensor, packing: Packing, *memory) -> torch.Tensor:
        """The last of `rows` alone; the place of every other one is free as soon as the next layer
        has run."""
        x = self.embedded(tokens, packing, 0)
        for layer in self.layers:
            x = layer.rows(x, packing, *memory)
        return self._normalised(x)

    def step(self, tokens: torch.Tensor, states: dict[str, State], *memory) -> list[torch.Tensor]:
        """The same [B, H] for the last of tokens int64 [B, T] alone: those before were the last
        ones in earlier steps.

        What the layers keep between steps goes into `states`, an empty dict at first.

        Raises:
            ValueError: the layers have not been given each of those before.
        """
        kept = states.get(_key(0), {}).get("history")
        past = 0 if kept is None else kept.shape[1]
        if past != tokens.shape[1] - 1:
            raise ValueError(
                f"{tokens.shape[1]} words are given, but the states hold {past}; only the last word"
                " is computed: "
                "give a prefix word by word, and begin a new one with empty states"
            )
        # Also of sentences that begin with padding.
        packing = Packing(shape=(len(tokens), 1), backend=self.embed_tokens.target)
        found = [self.embedded(tokens[:, -1:], packing, tokens.shape[1] - 1)]
        for index, layer in enumerate(self.layers):
            found.append(layer.step(found[-1], *memory, states.setdefault(_key(index), {})))
        return [*found, self._normalised(found[-1])]

    def embedded(self, tokens: torch.Tensor, packing: Packing, offset: int) -> torch.Tensor:
        """Return the input [M, H] of the first layer, of tokens int64 [B, T] at positions from
        `offset` on."""
        return self.embed_tokens.rows(tokens, packing, offset)

    def reorder(self, states: dict[str, State], order: torch.Tensor) -> None:
        """Keep the sentences `order` int64 [B'] of all states, in place."""
        for index in range(len(self.layers)):
            reorder(states.get(_key(index), {}), order)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.layer_norm is None else self.layer_norm(x)


def _key(index: int) -> str:
    return f"lsq_layer_{index}"

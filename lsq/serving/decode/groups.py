"""Diverse beam search (Vijayakumar et al. 2018), with penalties that add up over a hypothesis, as
in fairseq.

S sentences, B rows of each, G groups of B / G rows, N continuations that a group chooses.
"""

import torch
from torch import Tensor

from lsq.serving.decode.options import SearchOptions
from lsq.serving.decode.selection import Chosen, best


class GroupSelection:
    """Groups that choose one after another; row b is of group b % G.

    A word costs `diverse_beam_strength` for each time that an earlier group has just chosen it, and
    as much again for each word that both groups have chosen at the same place before.

    Raises:
        ValueError: the beam, which a small vocabulary has made smaller, cannot be divided by the
            groups.
    """

    def __init__(self, options: SearchOptions, beam: int, vocabulary: int):
        self.groups, self.strength = options.diverse_beam_groups, options.diverse_beam_strength
        self.vocabulary = vocabulary
        if beam % self.groups:
            raise ValueError(
                f"diverse_beam_groups is {self.groups}, but {vocabulary} words allow a beam of"
                f" {beam} at most; give a"
                " beam that the groups divide"
            )
        self.size = beam // self.groups
        self.needed = self.size + beam  # up to `beam` words become less probable

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """See `Selection.choose`."""
        first = totals is None
        if first:
            self.alike = torch.zeros(
                len(sentences), self.groups, self.groups, dtype=torch.float32, device=words.device
            )
        found: list[Chosen] = []
        for group in range(self.groups):
            own = slice(None) if first else slice(group, None, self.groups)
            probabilities = log_probabilities[:, own]
            if group:
                penalty = self._penalty(
                    words[:, own], found, 1 + self.alike[sentences, group, :group]
                )
                probabilities = torch.add(probabilities, penalty, alpha=-self.strength)
            of_rows = None if first else totals[:, own]
            found.append(best(words[:, own], probabilities, of_rows, self.size, self.vocabulary))
        chosen = torch.stack([each.words for each in found], 2)  # [S, N, G]
        self.alike[sentences] += (chosen[:, :, :, None] == chosen[:, :, None]).sum(1)
        rows = [
            each.rows if first else each.rows * self.groups + group
            for group, each in enumerate(found)
        ]
        scores = torch.stack([each.scores for each in found], 2)
        return Chosen(
            scores=scores.flatten(1), words=chosen.flatten(1), rows=torch.stack(rows, 2).flatten(1)
        )

    @staticmethod
    def _penalty(words: Tensor, earlier: list[Chosen], weights: Tensor) -> Tensor:
        """What words [S, B', C] cost for what earlier groups chose, weighted by float32 [S,
        group]."""
        penalty = torch.zeros(words.shape, dtype=torch.float32, device=words.device)
        for chosen, weight in zip(earlier, weights.T, strict=True):
            for word in chosen.words.T:
                penalty += (words == word[:, None, None]) * weight[:, None, None]
        return penalty

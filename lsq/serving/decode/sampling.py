"""Hypotheses drawn at random. S sentences, B rows of each, C words that may follow each row."""

import torch
from torch import Tensor
from torch.nn import functional

from lsq.serving.decode.options import SearchOptions
from lsq.serving.decode.selection import Chosen


class SamplingSelection:
    """Each row goes on by a word that is drawn from all, or from the most probable ones.

    Args:
        options: how many of the most probable (Fan et al. 2018), or up to which sum (Holtzman et
            al. 2020).
        beam: rows of a sentence.
        vocabulary: V.
        generator: what is drawn follows from it.
    """

    def __init__(
        self, options: SearchOptions, beam: int, vocabulary: int, generator: torch.Generator
    ):
        self.beam, self.generator = beam, generator
        self.sum = options.sampling_topp
        self.needed = min(options.sampling_topk, vocabulary) if options.sampling_topk > 0 else None

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """See `Selection.choose`."""
        count, rows, _ = words.shape
        words, probabilities = self._limited(words, log_probabilities)
        places = self._draw(probabilities.view(count * rows, -1), self.beam // rows).view(
            count, rows, -1
        )
        scores = probabilities.gather(2, places).log()
        if totals is not None:
            scores = scores + totals[:, :, None]
        numbers = torch.arange(rows, device=words.device)[:, None].expand_as(places)
        found = (scores, words.gather(2, places), numbers)
        scores, words, numbers = (each.reshape(count, self.beam) for each in found)
        return Chosen(scores=scores, words=words, rows=numbers)

    def _limited(self, words: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """The words to draw from and their probabilities, whose sum may be below 1: [S, B, C']
        each."""
        if self.needed is not None:
            found, places = log_probabilities.topk(min(self.needed, words.shape[2]), dim=2)
            # of the end alone; as many numbers are drawn at every step
            lacking = (
                0,
                self.needed - found.shape[2],
            )
            return functional.pad(words.gather(2, places), lacking), functional.pad(
                found.exp(), lacking
            )
        probabilities = log_probabilities.exp()
        if self.sum == -1:
            return words, probabilities
        probabilities, places = probabilities.sort(dim=2, descending=True)
        before = functional.pad(probabilities.cumsum(2)[:, :, :-1], (1, 0), value=-1.0)
        kept = before < self.sum
        most = int(kept.sum(2).max())
        return words.gather(2, places[:, :, :most]), (probabilities * kept)[:, :, :most]

    def _draw(self, probabilities: Tensor, count: int) -> Tensor:
        """`count` places of each row of float32 [R, C]; any place, of probability 0, where a row
        has no other."""
        possible = probabilities.sum(1, keepdim=True) > 0  # not so where there is NaN, either
        whole = torch.where(possible, probabilities, 1.0)
        return torch.multinomial(whole, count, replacement=True, generator=self.generator)

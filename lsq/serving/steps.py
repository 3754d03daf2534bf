"""The interface of a model for a search, the results of a search, and steps of fairseq's models.

R open hypotheses ("rows"), T words of a row so far, V words of the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """Numbers of special words; the defaults are as in fairseq's dictionaries."""

    start: int = 2
    """The word before every hypothesis; in fairseq's translation this is the end."""
    padding: int = 1
    """The word that is never chosen."""
    end: int = 2
    unknown: int = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """One translation of a sentence."""

    words: Tensor
    """int64 [T], the end of the sentence included."""
    score: float
    """Sum of the words' log-probabilities; if scores are normalised, divided by T to the power of
    the length penalty."""
    word_scores: Tensor
    """float32 [T], the log-probability of each word."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Words that may follow each of R rows."""

    words: Tensor
    """int64 [R, K], the most probable first."""
    log_probabilities: Tensor
    """float32 [R, K]"""
    wanted: Tensor | None
    """float32 [R, W], log-probabilities of the words that were asked for."""


class Steps(Protocol):
    """A model that decodes a batch of sentences word by word."""

    words: int
    """V, the size of the target vocabulary, special symbols included."""
    longest: int
    """Largest number of words of a hypothesis, its end included."""

    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S], each with its end, and forget the batch before.

        A language model ignores the words of the sources; only their number counts.

        Args:
            rows: largest number of hypotheses, of all sentences, that will be open at a time.
            steps: largest number of steps.
        """

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        """Extend each row by one word and return what may follow.

        Args:
            words: int64 [R], the last word of each row.
            parents: int64 [R], the row of the step before that each row extends; at the first
                step, its sentence. Rows without children are forgotten; R may change.
            top: K, how many words to return for each row, at most V.
            wanted: int64 [R, W], words whose log-probabilities are returned in any case.
        """

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """Extend rows as `step` does; return all log-probabilities, float32 [R, V]."""


class FairseqSteps:
    """Decodes with encoder-decoder or language models of fairseq; several models are averaged. It
    is slow: it serves models that the engine cannot decode, and as the engine's reference.

    Args:
        models: in eval mode, with one target dictionary.

    Raises:
        ValueError: a model cannot decode word by word, or their vocabularies differ.
    """

    def __init__(self, *models: nn.Module):
        for model in models:
            if not hasattr(getattr(model, "decoder", None), "reorder_incremental_state_scripting"):
                raise ValueError(
                    f"{type(model).__name__} has no decoder of fairseq's that goes word by word"
                )
        self.models = models
        dictionaries = [model.decoder.dictionary for model in models]
        if any(dictionary != dictionaries[0] for dictionary in dictionaries):
            raise ValueError(
                "the models have different target dictionaries; give models of one training's data"
            )
        self.words = len(dictionaries[0])
        self.padding = dictionaries[0].pad()
        self.longest = min(model.max_decoder_positions() for model in models)

    @torch.no_grad()
    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        self.states: list[dict] = [{} for _ in self.models]
        self.sentences = torch.arange(len(sources), device=sources[0].device)  # of each row
        self.history = sources[0].new_empty(len(sources), 0)
        self.encoded = [self._encode(model, sources) for model in self.models]

    def _encode(self, model: nn.Module, sources: Sequence[Tensor]) -> dict | None:
        """Encode sentences, padded on their left as fairseq does; None for a language model."""
        if not hasattr(model, "encoder"):
            return None
        lengths = torch.tensor([len(source) for source in sources], device=sources[0].device)
        tokens = sources[0].new_full((len(sources), int(lengths.max())), self.padding)
        for row, source in zip(tokens, sources, strict=True):
            row[len(row) - len(source) :] = source
        return model.encoder.forward_torchscript({"src_tokens": tokens, "src_lengths": lengths})

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        values = self.step_all(words, parents)
        best, named = values.topk(top, dim=1), None if wanted is None else values.gather(1, wanted)
        return Candidates(words=best.indices, log_probabilities=best.values, wanted=named)

    @torch.no_grad()
    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        sentences = self.sentences[parents]
        orders = [parents]
        if len(sentences) == len(self.sentences) and not sentences.equal(self.sentences):
            # if the number of rows stays, fairseq assumes the same sentences and does not move the
            # encoder output: reorder with one row more, and back
            orders = [
                torch.cat([parents, parents[:1]]),
                torch.arange(len(parents), device=parents.device),
            ]
        self.sentences = sentences
        self.history = torch.cat([self.history[parents], words[:, None]], 1)
        results = []
        for number, (model, state) in enumerate(zip(self.models, self.states, strict=True)):
            for order in orders if state else []:
                model.decoder.reorder_incremental_state_scripting(state, order)
            if self.encoded[number] is not None:
                self.encoded[number] = model.encoder.reorder_encoder_out(
                    self.encoded[number], parents
                )
            logits, *extra = model.decoder(
                self.history, encoder_out=self.encoded[number], incremental_state=state
            )
            output = (logits[:, -1:], *extra)
            results.append(model.get_normalized_probs(output, log_probs=True, sample=None)[:, -1])
        if len(results) == 1:
            return results[0]
        return torch.stack(results).logsumexp(0) - math.log(len(results))

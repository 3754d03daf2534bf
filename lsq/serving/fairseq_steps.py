"""Steps of models with fairseq's interface, as fairseq's own generator takes them: slow, for
models that the engine cannot decode, and its reference.

S source words, B sentences, R rows, T words of a row so far, V words of the vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lsq.serving.steps import Candidates


class FairseqSteps:
    """Decodes with encoder-decoder or language models of fairseq; several are averaged.

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
        """Return the encoder's output for sentences, padded on their left as fairseq does; None for
        a language model."""
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
        best, columns = highest(values, top)
        named = None if wanted is None else values.gather(1, wanted)
        return Candidates(words=columns, log_probabilities=best, wanted=named)

    @torch.no_grad()
    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        sentences = self.sentences[parents]
        orders = [parents]
        if len(sentences) == len(self.sentences) and not sentences.equal(self.sentences):
            # if the number of rows stays, fairseq takes their sentences for the same and does not
            # move the encoder's output
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


def highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest of float32 [R, V], best first, and their columns int64 [R, count];
    of equal ones the first."""
    best, columns = values.topk(count, dim=1)
    if ((values >= best[:, -1:]).sum(1) > count).any() or (best[:, 1:] == best[:, :-1]).any():
        ordered = values.sort(dim=1, descending=True, stable=True)
        best, columns = ordered.values[:, :count], ordered.indices[:, :count]
    return best, columns

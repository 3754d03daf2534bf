"""Decoding in int8 on the CPU: prepared steps on fixed addresses, a whole step of all layers in one call.

Weights are packed once. Keys and values are kept as codes and never moved: each row of a step has a list of the places
where its own lie, and going on from another row copies that list. The encoder's keys and values are made once for each
sentence. R rows, V words, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsq.backends import Backend, backend
from lsq.decode.model import PROJECTION, DecodingModel
from lsq.decode.prepared import Preparation, Recent, roomy
from lsq.decode.programs import encoder_program, step_program
from lsq.decode.steps import Candidates
from lsq.layers.blocks import Sentences
from lsq.ops.next_words import NextWords
from lsq.program.values import Coded

BACKENDS = ("cpu", "reference")
"""Where the engine runs; "reference" for comparison."""


class Engine:
    """A DecodingModel at work; satisfies lsq.decode.Steps. Not to be used by several threads at the same time.

    Args:
        model: which.
        place: where; None: the CPU.

    Raises:
        ValueError: it is another backend than the CPU's, or its C++ library is missing.
    """

    def __init__(self, model: DecodingModel, place: Backend | None = None):
        place = place or backend("cpu")
        if place.name not in BACKENDS:
            raise ValueError(
                f"the decoding engine runs on {' and '.join(BACKENDS)}, not on {place.name}; decode on the CPU, or "
                "with the model's own incremental steps"
            )
        self.model, self.place = model, place
        self.words = model.architecture.decoder.words
        self.longest = model.architecture.decoder.max_positions
        self._preparation = Preparation(model, place)
        hidden = model.architecture.decoder.config.hidden
        self._projection = self._preparation.weight(f"decoder.{PROJECTION}.weight", hidden)
        self._programs, self._encoders, self._runs = Recent(64), Recent(24), Recent(24)
        self._tensors: dict[str, Tensor] = {}
        self._sentences = self._rows = self._steps = 0
        self._taken = self._used = self._open = 0  # steps; places in the caches; rows of the last step

    @torch.no_grad()
    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S] that end with the end of a sentence; forget what was before. See Steps.begin.

        Raises:
            ValueError: there is no sentence, one is empty or too long or has a word outside the vocabulary, or more
                steps are to be taken than there are positions.
        """
        if not sources or rows < 1 or not 1 <= steps <= self.longest:
            raise ValueError(
                f"given {len(sources)} sentences, {rows} rows and {steps} steps; there must be at least one of each, "
                f"and at most {self.longest} steps"
            )
        self._sentences, self._rows, self._steps = len(sources), rows, steps
        self._taken = self._used = self._open = 0
        architecture = self.model.architecture
        hidden, capacity = architecture.decoder.config.hidden, filled(rows)
        for index in range(architecture.decoder.layers):
            self._memory(f"cache.{index}", (roomy(rows * steps), 2 * hidden), torch.int8)
        self._memory("lists", (capacity, roomy(steps)), torch.int64)
        for name in ("lengths", "tokens", "places", "sentence"):
            self._memory(name, (capacity,), torch.int64)
        self._memory("owned", (capacity,), torch.int64).copy_(torch.arange(len(self._tensors["owned"])))
        if architecture.encoder is not None:
            self._encode(sources)

    def step(self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None) -> Candidates:
        """What may follow when each row goes on by one word. See Steps.step.

        Raises:
            ValueError: there are more rows or steps than were announced; a word, a parent or `top` is out of its range.
        """
        if not 1 <= top <= self.words:
            raise ValueError(f"top is {top}; it must be from 1 to {self.words}")
        if wanted is not None:
            self._check("wanted", wanted, self.words)
        found = self._run(words, parents, top, wanted)
        rows = len(words)
        return Candidates(
            words=found.words[:rows].clone(), log_probabilities=found.scores[:rows].clone(),
            wanted=None if wanted is None else found.wanted_scores[:rows].clone(),
        )

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """The same, with the log-probabilities of all words: float32 [R, V]."""
        return self._run(words, parents, 0, None).every[: len(words)].clone()

    # A step

    @torch.no_grad()
    def _run(self, words: Tensor, parents: Tensor, top: int, wanted: Tensor | None) -> NextWords:
        rows, taken, tensors = len(words), self._taken, self._tensors
        if not 1 <= rows <= self._rows or len(parents) != rows:
            raise ValueError(
                f"given {rows} words and {len(parents)} parents; there must be as many of both, from 1 to "
                f"{self._rows}, the rows that were announced"
            )
        if taken >= self._steps:
            raise ValueError(f"{taken} steps were taken, as many as announced; begin anew, with more steps")
        self._check("words", words, self.words)
        self._check("parents", parents, self._open if taken else self._sentences)
        size = filled(rows)
        lists, sentence = tensors["lists"], tensors["sentence"]
        if taken:
            lists[:rows, :taken] = lists[:, :taken].index_select(0, parents)
            sentence[:rows] = sentence.index_select(0, parents)
        else:
            sentence[:rows] = parents
        lists[:rows, taken] = torch.arange(self._used, self._used + rows)
        sentence[rows:size] = 0
        for name, value, filling in (
            ("tokens", words, self.model.architecture.padding), ("lengths", taken + 1, 0),
            ("places", self.model.architecture.padding + 1 + taken, 0),
        ):  # fmt: skip
            tensors[name][:rows] = value
            tensors[name][rows:size] = filling
        run, end = self._prepared(size, top, 0 if wanted is None else wanted.shape[1])
        if wanted is not None:
            end.wanted[:rows] = wanted
        run()
        self._taken, self._used, self._open = taken + 1, self._used + rows, rows
        return end

    def _prepared(self, rows: int, top: int, asked: int):
        """(what runs a step of so many rows, the operation that ends it); `top` 0: with all log-probabilities."""
        return self._runs.of((rows, top, asked), lambda: self._prepare(rows, top, asked))

    @torch.inference_mode(False)  # what is kept is written to in both modes
    def _prepare(self, rows: int, top: int, asked: int):
        architecture, take = self.model.architecture, self._preparation.blocks.take
        program = self._programs.of(rows, lambda: step_program(architecture, rows, self.place))
        views = {name: self._tensors[name][:rows] for name in ("tokens", "places", "owned", "sentence")}
        calls, borders = self._preparation.calls(program, {**self._tensors, **views})
        codes, scale = (borders[tensor] for tensor in program.outputs)
        end = NextWords(
            x=Coded(format=architecture.decoder.config.quant.activations, codes=codes, scale=scale),
            packed_weight=self._projection, vocabulary=self.words,
            wanted=torch.zeros(rows, asked, dtype=torch.int64) if asked else None,
            wanted_scores=take((rows, asked), torch.float32) if asked else None,
            words=take((rows, top), torch.int64) if top else None,
            scores=take((rows, top), torch.float32) if top else None,
            every=None if top else take((rows, self.words), torch.float32),
        )
        return self.place.prepare([*calls, (end, ())]), end

    # The beginning

    def _encode(self, sources: Sequence[Tensor]) -> None:
        """Make the memory of every sentence."""
        architecture, stack = self.model.architecture, self.model.architecture.encoder
        lengths = torch.tensor([len(source) for source in sources])
        if int(lengths.min()) < 1 or int(lengths.max()) > stack.max_positions:
            raise ValueError(
                f"sentences have {int(lengths.min())} to {int(lengths.max())} words; they must have from 1 to "
                f"{stack.max_positions}: split long ones"
            )
        tokens = torch.cat(list(sources))
        self._check("sources", tokens, stack.words)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        size, count = Sentences(rows=len(tokens), count=len(sources)).filled(), len(sources)
        for index in range(architecture.decoder.layers):
            self._memory(f"memory.{index}", (roomy(size.rows), 2 * stack.config.hidden), torch.int8)
            self._memory(f"memory_scale.{index}", (1,), torch.float32)
        memory_lengths = self._memory("memory_lengths", (roomy(count),), torch.int64)
        longest = int(lengths.max())
        lists = self._memory("memory_lists", (roomy(count), roomy(longest)), torch.int64)
        run, borders = self._encoders.of(size, lambda: self._encoder(size))
        place = torch.arange(len(tokens)) - starts[:-1].repeat_interleave(lengths) + architecture.padding + 1
        for name, values, filling in (
            ("tokens", tokens, architecture.padding), ("places", place, architecture.padding),
            ("starts", starts, len(tokens)),
        ):  # fmt: skip
            borders[name][: len(values)] = values
            borders[name][len(values) :] = filling
        run()
        memory_lengths[:count] = lengths
        lists[:count, :longest] = starts[:-1, None] + torch.arange(longest)

    @torch.inference_mode(False)
    def _encoder(self, size: Sentences):
        """(what encodes a batch of that size, its inputs by name)."""
        architecture = self.model.architecture
        program = self._programs.of(size, lambda: encoder_program(architecture, size, self.place))
        inputs = {name: torch.zeros(size.rows, dtype=torch.int64) for name in ("tokens", "places")}
        inputs["starts"] = torch.zeros(size.count + 1, dtype=torch.int32)
        results = {}
        for index, (codes, scale) in enumerate(zip(program.outputs[::2], program.outputs[1::2], strict=True)):
            results[codes] = self._tensors[f"memory.{index}"][: size.rows]
            results[scale] = self._tensors[f"memory_scale.{index}"]
        calls, _ = self._preparation.calls(program, inputs, results)
        return self.place.prepare(calls), inputs

    # Memory

    @torch.inference_mode(False)
    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name, at least so large: where it has to grow, nothing prepared is right any more."""
        kept = self._tensors.get(name)
        if kept is None or any(have < want for have, want in zip(kept.shape, shape, strict=True)):
            before = kept.shape if kept is not None else (0,) * len(shape)
            sizes = [max(have, want) for have, want in zip(before, shape, strict=True)]
            self._tensors[name] = kept = self.place.allocate(sizes, dtype)  # CPU: a page is none before it is touched
            self._runs.clear()
            self._encoders.clear()
        return kept

    @staticmethod
    def _check(name: str, values: Tensor, limit: int) -> None:
        if values.dtype != torch.int64:
            raise ValueError(f"{name} are {values.dtype}; they must be int64")
        least, most = (int(one) for one in values.aminmax())
        if least < 0 or most >= limit:
            raise ValueError(f"{name} lie between {least} and {most}; they must lie from 0 to {limit - 1}")


def filled(rows: int) -> int:
    """At least as many, one of few numbers: a power of two up to 32, then a multiple of 32, then four numbers between
    two powers of two."""
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = max(32, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // step) * step

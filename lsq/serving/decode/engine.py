"""Decoding in int8: prepared steps on fixed addresses, a whole step of all layers in one call.

Weights are put where products read them once, packed on the CPU. Keys and values are kept as codes
and never moved: each row of a step has a list of the places where its own lie, and going on from
another row copies that list. The encoder's keys and values are made once for each sentence. R rows,
V words, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsq.layers.blocks import PackedSequences
from lsq.ops.next_words import NextWords
from lsq.ops.packed_project import PackedWeight
from lsq.program.values import Coded
from lsq.run.backends import Backend, backend
from lsq.serving.decode.model import PROJECTION, DecodingModel
from lsq.serving.decode.prepared import Preparation, Recent, roomy
from lsq.serving.decode.programs import encoder_program, step_program
from lsq.serving.decode.steps import Candidates


class Engine:
    """A DecodingModel at work; satisfies lsq.serving.decode.Steps.

    Not to be used by several threads at the same time.

    Sources, words and parents may lie on the CPU, wherever the engine runs, and candidates lie
    where words do. Nothing waits for a GPU inside a step but what copies candidates to the CPU; so
    the values of words and parents that lie on one are not looked at.

    Args:
        model: which.
        place: where it runs; None: the CPU.

    Raises:
        ValueError: the C++ library is missing, or on a GPU kernels cannot take the model's widths.
    """

    def __init__(self, model: DecodingModel, place: Backend | None = None):
        place = place or backend("cpu")
        self.model, self.place = model, place
        self.words = model.architecture.decoder.words
        self.longest = model.architecture.decoder.max_positions
        self._preparation = Preparation(model, place)
        hidden = model.architecture.decoder.config.hidden
        projection = self._preparation.weight(f"decoder.{PROJECTION}.weight", hidden, plain=True)
        self._projection = {
            "packed_weight" if isinstance(projection, PackedWeight) else "weight": projection
        }
        self._programs, self._encoders, self._runs = Recent(64), Recent(24), Recent(24)
        self._tensors: dict[str, Tensor] = {}
        self._sentences = self._rows = self._steps = 0
        self._taken = self._used = self._open = (
            0  # steps; places in the caches; rows of the last step
        )

    def __reduce__(self):
        """Refuse: to send a tensor to a process moves its memory, and prepared steps have addresses
        in it."""
        raise TypeError(
            "a decoding engine is neither copied nor pickled; make one of its model where it is"
            " needed"
        )

    @torch.no_grad()
    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S] that end with the end of a sentence; forget what was before.

        See Steps.begin.

        Raises:
            ValueError: there is no sentence, one is empty or too long or has a word outside the
                vocabulary, or more steps are to be taken than there are positions.
        """
        if not sources or rows < 1 or not 1 <= steps <= self.longest:
            raise ValueError(
                f"given {len(sources)} sentences, {rows} rows and {steps} steps; there must be at"
                " least one of each, "
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
        owned = self._memory("owned", (capacity,), torch.int64)
        torch.arange(len(owned), out=owned)
        if architecture.encoder is not None:
            self._encode(sources)

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        """What may follow when each row goes on by one word. See Steps.step.

        Raises:
            ValueError: there are more rows or steps than were announced; a word, a parent or `top`
                is out of its range.
        """
        if not 1 <= top <= self.words:
            raise ValueError(f"top is {top}; it must be from 1 to {self.words}")
        if wanted is not None:
            self._check("wanted", wanted, self.words)
        found = self._run(words, parents, top, wanted)
        rows, to = len(words), words.device
        return Candidates(
            words=found.words[:rows].to(to, copy=True),
            log_probabilities=found.scores[:rows].to(to, copy=True),
            wanted=None if wanted is None else found.wanted_scores[:rows].to(to, copy=True),
        )

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """The same, with the log-probabilities of all words: float32 [R, V]."""
        return self._run(words, parents, 0, None).every[: len(words)].to(words.device, copy=True)

    # A step

    @torch.no_grad()
    def _run(self, words: Tensor, parents: Tensor, top: int, wanted: Tensor | None) -> NextWords:
        rows, taken = len(words), self._taken
        if not 1 <= rows <= self._rows or len(parents) != rows:
            raise ValueError(
                f"given {rows} words and {len(parents)} parents; there must be as many of both,"
                " from 1 to "
                f"{self._rows}, the rows that were announced"
            )
        if taken >= self._steps:
            raise ValueError(
                f"{taken} steps were taken, as many as announced; begin anew, with more steps"
            )
        self._check("words", words, self.words)
        self._check("parents", parents, self._open if taken else self._sentences)
        words, parents, *asked = self._here(words, parents, *([] if wanted is None else [wanted]))
        size = filled(rows)
        self._go_on(words, parents, size)
        run, end = self._prepared(size, top, asked[0].shape[1] if asked else 0)
        if asked:
            end.wanted[:rows].copy_(asked[0])
        run()
        self._taken, self._used, self._open = taken + 1, self._used + rows, rows
        return end

    def _go_on(self, words: Tensor, parents: Tensor, size: int) -> None:
        """Make the lists and inputs of the next step's rows from those of their parents, and fill
        up to `size` rows."""
        rows, taken, tensors, padding = (
            len(words),
            self._taken,
            self._tensors,
            self.model.architecture.padding,
        )
        lists, sentence = tensors["lists"], tensors["sentence"]
        if taken:
            lists[:rows, :taken].copy_(lists[:, :taken].index_select(0, parents))
            parents = sentence.index_select(0, parents)
        sentence[:rows].copy_(parents)
        torch.add(tensors["owned"][:rows], self._used, out=lists[:rows, taken])
        tensors["tokens"][:rows].copy_(words)
        for name, value in (("lengths", taken + 1), ("places", padding + 1 + taken)):
            tensors[name][:rows].fill_(value)
        if rows < size:  # rows of nobody
            for name, value in (
                ("sentence", 0),
                ("tokens", padding),
                ("lengths", 0),
                ("places", 0),
            ):
                tensors[name][rows:size].fill_(value)

    def _prepared(self, rows: int, top: int, asked: int):
        """(what runs a step of so many rows, the operation that ends it); `top` 0: with all
        log-probabilities."""
        return self._runs.of((rows, top, asked), lambda: self._prepare(rows, top, asked))

    @torch.inference_mode(False)  # what is kept is written to in both modes
    def _prepare(self, rows: int, top: int, asked: int):
        architecture, take = self.model.architecture, self._preparation.blocks.take
        program = self._programs.of(rows, lambda: step_program(architecture, rows, self.place))
        views = {
            name: self._tensors[name][:rows] for name in ("tokens", "places", "owned", "sentence")
        }
        calls, borders = self._preparation.calls(program, {**self._tensors, **views})
        codes, scale = (borders[tensor] for tensor in program.outputs)
        end = NextWords(
            x=Coded(format=architecture.decoder.config.quant.activations, codes=codes, scale=scale),
            **self._projection,
            vocabulary=self.words,
            wanted=self.place.allocate((rows, asked), torch.int64).zero_() if asked else None,
            wanted_scores=take((rows, asked), torch.float32) if asked else None,
            words=take((rows, top), torch.int64) if top else None,
            scores=take((rows, top), torch.float32) if top else None,
            every=None if top else take((rows, self.words), torch.float32),
        )
        scratch = [take(*spec) for spec in self.place.scratch(end)]
        return self.place.prepare([*calls, (end, scratch)]), end

    # The beginning

    def _encode(self, sources: Sequence[Tensor]) -> None:
        """Make the memory of every sentence."""
        architecture, stack = self.model.architecture, self.model.architecture.encoder
        lengths = torch.tensor([len(source) for source in sources])
        if int(lengths.min()) < 1 or int(lengths.max()) > stack.max_positions:
            raise ValueError(
                f"sentences have {int(lengths.min())} to {int(lengths.max())} words; they must have"
                " from 1 to "
                f"{stack.max_positions}: split long ones"
            )
        tokens = torch.cat(list(sources)).cpu()
        self._check("sources", tokens, stack.words)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        size, count = PackedSequences(rows=len(tokens), count=len(sources)).filled(), len(sources)
        for index in range(architecture.decoder.layers):
            self._memory(f"memory.{index}", (roomy(size.rows), 2 * stack.config.hidden), torch.int8)
            self._memory(f"memory_scale.{index}", (1,), torch.float32)
        memory_lengths = self._memory("memory_lengths", (roomy(count),), torch.int64)
        longest = int(lengths.max())
        lists = self._memory("memory_lists", (roomy(count), roomy(longest)), torch.int64)
        run, borders = self._encoders.of(size, lambda: self._encoder(size))
        places = (
            torch.arange(len(tokens))
            - cu_seqlens[:-1].repeat_interleave(lengths)
            + architecture.padding
            + 1
        )
        tokens, places, cu_seqlens, lengths = self._here(tokens, places, cu_seqlens, lengths)
        for name, values, filling in (
            ("tokens", tokens, architecture.padding),
            ("places", places, architecture.padding),
            ("cu_seqlens", cu_seqlens, len(tokens)),
        ):
            borders[name][: len(values)] = values
            borders[name][len(values) :] = filling
        run()
        memory_lengths[:count] = lengths
        lists[:count, :longest] = cu_seqlens[:-1, None] + torch.arange(
            longest, device=cu_seqlens.device
        )

    @torch.inference_mode(False)
    def _encoder(self, size: PackedSequences):
        """(what encodes a batch of that size, its inputs by name)."""
        architecture = self.model.architecture
        program = self._programs.of(size, lambda: encoder_program(architecture, size, self.place))
        allocate = self.place.allocate
        inputs = {name: allocate((size.rows,), torch.int64) for name in ("tokens", "places")}
        inputs["cu_seqlens"] = allocate((size.count + 1,), torch.int32)
        results = {}
        for index, (codes, scale) in enumerate(
            zip(program.outputs[::2], program.outputs[1::2], strict=True)
        ):
            results[codes] = self._tensors[f"memory.{index}"][: size.rows]
            results[scale] = self._tensors[f"memory_scale.{index}"]
        calls, _ = self._preparation.calls(program, inputs, results)
        return self.place.prepare(calls), inputs

    # Memory

    @torch.inference_mode(False)
    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name, at least so large: where it has to grow, nothing prepared is
        right any more."""
        kept = self._tensors.get(name)
        if kept is None or any(have < want for have, want in zip(kept.shape, shape, strict=True)):
            before = kept.shape if kept is not None else (0,) * len(shape)
            sizes = [max(have, want) for have, want in zip(before, shape, strict=True)]
            # first: Ctrl-C may end this between any two lines, and those write into what is freed
            self._runs.clear()
            self._encoders.clear()
            # CPU: a page is none before it is touched
            self._tensors[name] = kept = self.place.allocate(sizes, dtype)
        return kept

    def _here(self, *given: Tensor) -> list[Tensor]:
        """The same on the engine's device."""
        return self.place.send(given) if given[0].device.type == "cpu" else list(given)

    @staticmethod
    def _check(name: str, values: Tensor, limit: int) -> None:
        if values.dtype != torch.int64:
            raise ValueError(f"{name} are {values.dtype}; they must be int64")
        if values.device.type != "cpu":  # to look at them would wait
            return
        least, most = (int(one) for one in values.aminmax())
        if least < 0 or most >= limit:
            raise ValueError(
                f"{name} lie between {least} and {most}; they must lie from 0 to {limit - 1}"
            )


def filled(rows: int) -> int:
    """At least as many, one of few numbers: a power of two up to 32, then a multiple of 32, then
    four numbers between two powers of two.
    """
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = max(32, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // step) * step

"""Decoding in int8: prepared steps on fixed addresses, a whole step of all layers in one call.

Weights are laid out once where products read them, packed on the CPU. Keys and values are kept as
codes and never moved: each row of a step has a list of the positions of its own in the cache, and
to extend another row copies that list. The encoder's keys and values are made once for each
sentence. R rows, V words, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsq.layers.blocks import PackedSequences
from lsq.ops.next_words import NextWords
from lsq.ops.packed_project import PackedWeight
from lsq.program.values import Coded
from lsq.run import backends
from lsq.run.backends import Backend
from lsq.serving.decoding_model import PROJECTION, DecodingModel
from lsq.serving.preparation import Preparation, Recent, roomy
from lsq.serving.step_programs import encoder_program, step_program
from lsq.serving.steps import Candidates


class Engine:
    """Decodes with a DecodingModel; implements lsq.serving.Steps, for one thread at a time.

    Sources, words and parents may lie on the CPU, wherever the engine runs, and candidates lie
    where words do. Values of words and parents on a GPU are not checked: that would wait for it.

    Args:
        model: the model.
        backend: where it runs; None: the CPU.

    Raises:
        ValueError: the C++ library is missing, or on a GPU kernels cannot take the model's widths.
    """

    def __init__(self, model: DecodingModel, backend: Backend | None = None):
        self.model, self.backend = model, backend or backends.backend("cpu")
        architecture = model.architecture
        self.words = architecture.decoder.words
        self.longest = architecture.decoder.max_positions
        self._preparation = Preparation(model, self.backend)
        weight = self._preparation.weight(
            f"decoder.{PROJECTION}.weight", architecture.decoder.config.hidden, plain=True
        )
        name = "packed_weight" if isinstance(weight, PackedWeight) else "weight"
        self._projection = {name: weight}
        self._programs, self._encoders, self._runs = Recent(64), Recent(24), Recent(24)
        self._tensors: dict[str, Tensor] = {}
        self._sentences = self._rows = self._steps = 0
        # steps; used positions of the caches; rows of the last step
        self._taken = self._used = self._open = 0

    def __reduce__(self):
        """Refuse: to send a tensor to a process moves its memory, to which prepared steps point."""
        raise TypeError(
            "a decoding engine is neither copied nor pickled; make one of its model where it is"
            " needed"
        )

    @torch.no_grad()
    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S], each with its end, and forget the batch before; see Steps.

        Raises:
            ValueError: there is no sentence, one is empty or too long or has a word outside the
                vocabulary, or there are more steps than positions.
        """
        if not sources or rows < 1 or not 1 <= steps <= self.longest:
            raise ValueError(
                f"given {len(sources)} sentences, {rows} rows and {steps} steps; there must be at"
                f" least one of each, and at most {self.longest} steps"
            )
        self._sentences, self._rows, self._steps = len(sources), rows, steps
        self._taken = self._used = self._open = 0
        architecture = self.model.architecture
        hidden, capacity = architecture.decoder.config.hidden, filled(rows)
        for index in range(architecture.decoder.layers):
            self._reserve(f"cache.{index}", (roomy(rows * steps), 2 * hidden), torch.int8)
        self._reserve("lists", (capacity, roomy(steps)), torch.int64)
        for name in ("lengths", "tokens", "positions", "sentence"):
            self._reserve(name, (capacity,), torch.int64)
        owned = self._reserve("owned", (capacity,), torch.int64)
        torch.arange(len(owned), out=owned)
        if architecture.encoder is not None:
            self._encode(sources)

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        """Extend each row by one word and return what may follow; see Steps.

        Raises:
            ValueError: there are more rows or steps than `begin` was given; a word, a parent or
                `top` is out of its range.
        """
        if not 1 <= top <= self.words:
            raise ValueError(f"top is {top}; it must be from 1 to {self.words}")
        if wanted is not None:
            self._check("wanted", wanted, self.words)
        end = self._run(words, parents, top, wanted)
        rows, to = len(words), words.device
        return Candidates(
            words=end.words[:rows].to(to, copy=True),
            log_probabilities=end.scores[:rows].to(to, copy=True),
            wanted=None if wanted is None else end.wanted_scores[:rows].to(to, copy=True),
        )

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """Extend rows as `step` does; return all log-probabilities, float32 [R, V]."""
        return self._run(words, parents, 0, None).every[: len(words)].to(words.device, copy=True)

    @torch.no_grad()
    def _run(self, words: Tensor, parents: Tensor, top: int, wanted: Tensor | None) -> NextWords:
        """Take a step and return its last operation; `top` 0: with all log-probabilities."""
        rows, taken = len(words), self._taken
        if not 1 <= rows <= self._rows or len(parents) != rows:
            raise ValueError(
                f"given {rows} words and {len(parents)} parents; there must be as many of both,"
                f" from 1 to {self._rows}, the rows that were announced"
            )
        if taken >= self._steps:
            raise ValueError(
                f"{taken} steps were taken, as many as announced; begin anew, with more steps"
            )
        self._check("words", words, self.words)
        self._check("parents", parents, self._open if taken else self._sentences)
        words, parents, *asked = self._here(words, parents, *([] if wanted is None else [wanted]))
        size, count = filled(rows), asked[0].shape[1] if asked else 0
        self._fill_inputs(words, parents, size)
        run, end = self._runs.of((size, top, count), lambda: self._prepare(size, top, count))
        if asked:
            end.wanted[:rows].copy_(asked[0])
        run()
        self._taken, self._used, self._open = taken + 1, self._used + rows, rows
        return end

    def _fill_inputs(self, words: Tensor, parents: Tensor, size: int) -> None:
        """Make the lists and inputs of the next step from those of the parents, for `size` rows;
        surplus rows are padding."""
        rows, taken, tensors = len(words), self._taken, self._tensors
        padding = self.model.architecture.padding
        lists, sentence = tensors["lists"], tensors["sentence"]
        if taken:
            lists[:rows, :taken].copy_(lists[:, :taken].index_select(0, parents))
            parents = sentence.index_select(0, parents)
        sentence[:rows].copy_(parents)
        torch.add(tensors["owned"][:rows], self._used, out=lists[:rows, taken])
        tensors["tokens"][:rows].copy_(words)
        tensors["lengths"][:rows].fill_(taken + 1)
        tensors["positions"][:rows].fill_(padding + 1 + taken)
        if rows < size:
            tensors["tokens"][rows:size].fill_(padding)
            for name in ("sentence", "lengths", "positions"):
                tensors[name][rows:size].fill_(0)

    @torch.inference_mode(False)  # kept tensors are written to in both modes
    def _prepare(self, rows: int, top: int, asked: int):
        """Prepare a step of so many rows: (what runs it, its last operation)."""
        architecture, take = self.model.architecture, self._preparation.blocks.take
        program = self._programs.of(rows, lambda: step_program(architecture, rows, self.backend))
        names = ("tokens", "positions", "owned", "sentence")
        views = {name: self._tensors[name][:rows] for name in names}
        calls, tensors = self._preparation.calls(program, {**self._tensors, **views})
        codes, scale = (tensors[output] for output in program.outputs)
        allocate = self.backend.allocate
        end = NextWords(
            x=Coded(format=architecture.decoder.config.quant.activations, codes=codes, scale=scale),
            **self._projection,
            vocabulary=self.words,
            wanted=allocate((rows, asked), torch.int64).zero_() if asked else None,
            wanted_scores=take((rows, asked), torch.float32) if asked else None,
            words=take((rows, top), torch.int64) if top else None,
            scores=take((rows, top), torch.float32) if top else None,
            every=None if top else take((rows, self.words), torch.float32),
        )
        scratch = [take(*spec) for spec in self.backend.scratch(end)]
        return self.backend.prepare([*calls, (end, scratch)]), end

    def _encode(self, sources: Sequence[Tensor]) -> None:
        """Compute keys and values of every sentence."""
        architecture, stack = self.model.architecture, self.model.architecture.encoder
        lengths = torch.tensor([len(source) for source in sources])
        longest = int(lengths.max())
        if int(lengths.min()) < 1 or longest > stack.max_positions:
            raise ValueError(
                f"sentences have {int(lengths.min())} to {longest} words; they must have from 1 to"
                f" {stack.max_positions}: split long ones"
            )
        tokens = torch.cat(list(sources)).cpu()
        self._check("sources", tokens, stack.words)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        size, count = PackedSequences(rows=len(tokens), count=len(sources)).filled(), len(sources)
        codes_shape = roomy(size.rows), 2 * stack.config.hidden
        for index in range(architecture.decoder.layers):
            self._reserve(f"encoder_out.{index}", codes_shape, torch.int8)
            self._reserve(f"encoder_scale.{index}", (1,), torch.float32)
        encoder_lengths = self._reserve("encoder_lengths", (roomy(count),), torch.int64)
        lists = self._reserve("encoder_lists", (roomy(count), roomy(longest)), torch.int64)
        run, inputs = self._encoders.of(size, lambda: self._prepare_encoder(size))
        positions = torch.arange(len(tokens)) - cu_seqlens[:-1].repeat_interleave(lengths)
        positions += architecture.padding + 1
        tokens, positions, cu_seqlens, lengths = self._here(tokens, positions, cu_seqlens, lengths)
        for name, values, filling in (
            ("tokens", tokens, architecture.padding),
            ("positions", positions, architecture.padding),
            ("cu_seqlens", cu_seqlens, len(tokens)),
        ):
            inputs[name][: len(values)] = values
            inputs[name][len(values) :] = filling
        run()
        encoder_lengths[:count] = lengths
        within = torch.arange(longest, device=cu_seqlens.device)
        lists[:count, :longest] = cu_seqlens[:-1, None] + within

    @torch.inference_mode(False)
    def _prepare_encoder(self, size: PackedSequences):
        """Prepare the encoding of a batch of that size: (what runs it, its inputs by name)."""
        architecture, allocate = self.model.architecture, self.backend.allocate
        program = self._programs.of(size, lambda: encoder_program(architecture, size, self.backend))
        inputs = {name: allocate((size.rows,), torch.int64) for name in ("tokens", "positions")}
        inputs["cu_seqlens"] = allocate((size.count + 1,), torch.int32)
        results = {}
        outputs = zip(program.outputs[::2], program.outputs[1::2], strict=True)
        for index, (codes, scale) in enumerate(outputs):
            results[codes] = self._tensors[f"encoder_out.{index}"][: size.rows]
            results[scale] = self._tensors[f"encoder_scale.{index}"]
        calls, _ = self._preparation.calls(program, inputs, results)
        return self.backend.prepare(calls), inputs

    @torch.inference_mode(False)
    def _reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor of that name, at least so large. If it has to grow, all that was
        prepared is forgotten."""
        kept = self._tensors.get(name)
        if kept is None or any(have < want for have, want in zip(kept.shape, shape, strict=True)):
            before = kept.shape if kept is not None else (0,) * len(shape)
            sizes = [max(have, want) for have, want in zip(before, shape, strict=True)]
            # first: Ctrl-C may end this between any two lines, and those write into what is freed
            self._runs.clear()
            self._encoders.clear()
            # on the CPU, pages take no memory before they are touched
            self._tensors[name] = kept = self.backend.allocate(sizes, dtype)
        return kept

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        """Move tensors to the engine's device."""
        return self.backend.send(tensors) if tensors[0].device.type == "cpu" else list(tensors)

    @staticmethod
    def _check(name: str, values: Tensor, limit: int) -> None:
        if values.dtype != torch.int64:
            raise ValueError(f"{name} are {values.dtype}; they must be int64")
        if values.device.type != "cpu":  # to look at them would wait
            return
        least, most = (int(value) for value in values.aminmax())
        if least < 0 or most >= limit:
            raise ValueError(
                f"{name} lie between {least} and {most}; they must lie from 0 to {limit - 1}"
            )


def filled(rows: int) -> int:
    """Round up to one of few numbers: a power of two up to 32, then a multiple of 32, then four
    numbers between two powers of two."""
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = max(32, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // step) * step

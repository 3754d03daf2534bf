"""Decoding in int8 by prepared steps: one call runs all layers, on tensors at fixed addresses.

Weights are laid out once as products read them; on the CPU they are packed. Keys and values are
kept as codes and never move. Each row of a step has a list of the positions of its own words in the
cache; a row that extends another row copies that list. The encoder's keys and values are made once
for each sentence. R rows, V words, H hidden.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lsq.layers.blocks import PackedSequences
from lsq.layers.embedding import sinusoidal_table
from lsq.models.sparsity import is_sparse, pack
from lsq.native import tiles
from lsq.ops.next_words import NextWords
from lsq.ops.nonlinearity import Activation
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.ops.project import Project
from lsq.ops.sparse_project import MOST_ROWS, OUTPUTS, SparseProject, SparseWeight
from lsq.program.backend import Call
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Weight
from lsq.quant.formats import Int4
from lsq.quant.layouts import CUDA
from lsq.quant.stored import Fields
from lsq.run import backends
from lsq.run.backends import Backend
from lsq.serving.decoding_model import PROJECTION, DecodingModel
from lsq.serving.step_programs import encoder_program, step_program
from lsq.serving.steps import Candidates
from lsq.serving.stored_codes import as_int8, ranks_of, stored_of

T = TypeVar("T")
FIELD_BITS = 4
"""Widest codes that are multiplied as packed fields; wider ones gain little over int8."""


class Recent(Generic[T]):
    """Cache of the `most` keys that were used last."""

    def __init__(self, most: int):
        self._most = most
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `key`, from the cache or else from `make`."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> None:
        self._kept.clear()


class Blocks:
    """Memory for tensors that live within one run of a program; all programs share it. Sizes are
    powers of two, so that few blocks serve programs of any size."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._all: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def begin(self) -> None:
        """Free every block, to prepare another program."""
        self._free = defaultdict(list, {size: list(blocks) for size, blocks in self._all.items()})

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wanted = math.prod(shape) * dtype.itemsize
        size = roomy(wanted)
        if not self._free[size]:
            block = self._backend.allocate((size,), torch.uint8)
            self._all[size].append(block)
            self._free[size].append(block)
        return self._free[size].pop()[:wanted].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Free the block of a tensor that nothing in this program reads any more."""
        storage = tensor.untyped_storage()
        self._free[storage.nbytes()].append(
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        )

    @property
    def bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._all.items())


class Preparation:
    """Binds programs that will run on `backend` to the tensors of a model."""

    def __init__(self, model: DecodingModel, backend: Backend):
        self._model, self._backend = model, backend
        self.blocks = Blocks(backend)
        self._weights: dict[str, Weight | PackedWeight] = {}
        self._sparse: dict[str, SparseWeight | None] = {}
        self._tensors = dict(model.tensors)
        architecture = model.architecture
        for side, stack in architecture.stacks.items():
            if stack.positions == "sinusoidal":
                rows = stack.max_positions + architecture.padding + 1
                table = sinusoidal_table(rows, stack.config.hidden, architecture.padding)
                self._tensors[f"{side}.embed_tokens.position_weight"] = table

    def weight(self, name: str, inner: int, *, plain: bool = False) -> Weight | PackedWeight:
        """Return a weight with `inner` inputs as products read it: packed on the CPU, elsewhere on
        the device as fields or in its stored form, or with `plain` unpacked."""
        if name not in self._weights:
            stored, scale = (self._model.tensors[name + part] for part in (".codes", ".scale"))
            form, device = self._model.architecture.format_of(name), self._backend.device
            width = form.largest.bit_length() + 1  # of signed codes
            if not self._backend.packs_weights:
                if plain:
                    stored, form = self._model.codes(name, inner).contiguous(), form.unpacked
                elif width <= FIELD_BITS and len(stored) % CUDA.pad[0] == 0:
                    form = Fields(name=form.name, bits=width, grain=form.grain)
                    stored = form.store(self._model.codes(name, inner))
                weight = Weight(format=form, codes=stored.to(device), scale=scale.to(device))
            elif isinstance(form, Int4):
                weight = PackedWeight.of_int4(stored, scale, inner)
            elif form.bits <= FIELD_BITS:
                kind, _ = stored_of(form)
                ranks = ranks_of(stored, form)
                weight = PackedWeight.of_stored(kind.stored(ranks), scale, kind)
            elif is_sparse(stored) and tiles.vectorised():
                weight = PackedWeight.of_sparse(stored, scale)
            else:
                weight = PackedWeight.of(stored, scale)
            self._weights[name] = weight
        return self._weights[name]

    def sparse_weight(self, name: str, inner: int) -> SparseWeight | None:
        """Return a weight for sparse kernels of few rows; None if they cannot take it."""
        if name not in self._sparse:
            codes, weight = self._model.codes(name, inner), None
            if is_sparse(codes) and len(codes) % OUTPUTS == 0:
                packed, scale = pack(codes), self._model.tensors[name + ".scale"]
                parts = (packed.values, packed.indices, scale)
                weight = SparseWeight.of(*(part.to(self._backend.device) for part in parts))
            self._sparse[name] = weight
        return self._sparse[name]

    def calls(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        results: Mapping[VirtualTensor, Tensor] | None = None,
    ) -> tuple[list[Call], dict[VirtualTensor, Tensor]]:
        """Bind a program to tensors; return (calls for a backend to prepare, all its tensors).

        Temporary tensors and outputs lie in `blocks`; the next program that runs overwrites them.

        Args:
            program: without a backward pass.
            inputs: inputs by name that are not tensors of the model.
            results: tensors for outputs that must stay.
        """
        tensors: dict[VirtualTensor, Tensor] = dict(results or {})
        of_weights = {tensor for weight in program.weights.values() for tensor in weight.written}
        for border in (*program.inputs, *program.parameters):
            name = border.name
            if name in inputs:
                tensors[border] = inputs[name]
            elif name in self._tensors and border not in of_weights:
                self._tensors[name] = self._tensors[name].to(self._backend.device)
                tensors[border] = self._tensors[name]
        self.blocks.begin()
        calls = []
        for index, operation in enumerate(program.operations):
            for virtual in program.outputs_of[index]:
                if virtual not in tensors:
                    tensors[virtual] = self.blocks.take(virtual.shape, virtual.dtype)
            bound = self._with_weight(operation).bind(
                lambda value: value if isinstance(value, Tensor) else tensors[value]
            )
            scratch = [self.blocks.take(*spec) for spec in self._backend.scratch(bound)]
            calls.append((bound, scratch))
            dead = [
                tensors[virtual]
                for virtual in program.dying[index]
                if virtual.role == "temporary" and virtual in tensors
            ]
            for tensor in (*dead, *scratch):
                self.blocks.give_back(tensor)
        return calls, tensors

    def _with_weight(self, operation: Operation) -> Operation:
        if not isinstance(operation, Project):
            return operation
        name, (rows, inner) = operation.weight.values.name, operation.x.tensor.shape
        few = not self._backend.packs_weights and rows <= MOST_ROWS
        sparse = self.sparse_weight(name, inner) if few else None
        shared = {"bias": operation.bias, "out": operation.out, "rounded": operation.rounded}
        if sparse is not None:
            return SparseProject(
                x=operation.x.bare(), weight=sparse, nonlinearity=operation.nonlinearity, **shared
            )
        weight = self.weight(name, inner)
        if isinstance(weight, Weight):
            return replace(operation, weight=weight)
        end = operation.nonlinearity
        return PackedProject(
            x=operation.x.coded.bare(),
            weight=weight,
            activation=Activation.none if end is None else end.activation,
            **shared,
        )


def roomy(count: int) -> int:
    """Return the smallest power of two that is at least `count`, so that tensors grow rarely."""
    return 1 << (count - 1).bit_length()


class Engine:
    """Decodes in int8 with a DecodingModel; implements lsq.serving.Steps, for one thread at a time.

    Sources, words and parents may lie on the CPU, wherever the engine runs. Candidates lie on the
    device of the words. Words and parents on a GPU are not checked, since that would wait for it.

    Without a backend it runs on the CPU. ValueError: the C++ library is missing, or a GPU's kernels
    cannot take the model's widths.
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
        # steps taken, used positions of the caches, rows of the last step
        self._taken = self._used = self._open = 0

    def __reduce__(self):
        """Refuse: a tensor sent to a process moves, and prepared steps point to its old memory."""
        raise TypeError(
            "a decoding engine is neither copied nor pickled; make one of its model where it is"
            " needed"
        )

    @torch.no_grad()
    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Begin a batch, see Steps; ValueError if there is no sentence, if a sentence is empty, too
        long or has a word outside the vocabulary, or if there are more steps than positions."""
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
        """Take a step, see Steps; ValueError if there are more rows or steps than `begin` was
        given, or if a word, a parent or `top` is out of its range."""
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
        return self._run(words, parents, 0, None).every[: len(words)].to(words.device, copy=True)

    @torch.no_grad()
    def _run(self, words: Tensor, parents: Tensor, top: int, wanted: Tensor | None) -> NextWords:
        """Take a step and return its last operation, with all log-probabilities if `top` is 0."""
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
        """Fill the next step's lists and inputs from the parents' lists; other rows are padding."""
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
        """Prepare a step of `rows` rows; return (function that runs it, its last operation)."""
        architecture, take = self.model.architecture, self._preparation.blocks.take
        program = self._programs.of(rows, lambda: step_program(architecture, rows, self.backend))
        names = ("tokens", "positions", "owned", "sentence")
        views = {name: self._tensors[name][:rows] for name in names}
        calls, tensors = self._preparation.calls(program, {**self._tensors, **views})
        codes, scale = (tensors[output] for output in program.outputs)
        allocate = self.backend.allocate
        end = NextWords(
            x=Coded(
                format=as_int8(architecture.decoder.config.quant).activations,
                codes=codes,
                scale=scale,
            ),
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
        """Prepare the encoder for batches of a size; return (function that runs it, its inputs)."""
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
        """Return the named tensor, of at least this shape; if it grows, drop prepared steps."""
        kept = self._tensors.get(name)
        if kept is None or any(have < want for have, want in zip(kept.shape, shape, strict=True)):
            before = kept.shape if kept is not None else (0,) * len(shape)
            sizes = [max(have, want) for have, want in zip(before, shape, strict=True)]
            # first: after a Ctrl-C between two lines prepared steps would write into freed memory
            self._runs.clear()
            self._encoders.clear()
            # on the CPU, pages take no memory before they are written to
            self._tensors[name] = kept = self.backend.allocate(sizes, dtype)
        return kept

    def _here(self, *tensors: Tensor) -> list[Tensor]:
        return self.backend.send(tensors) if tensors[0].device.type == "cpu" else list(tensors)

    @staticmethod
    def _check(name: str, values: Tensor, limit: int) -> None:
        if values.dtype != torch.int64:
            raise ValueError(f"{name} are {values.dtype}; they must be int64")
        if values.device.type != "cpu":  # a look at them would wait for the GPU
            return
        least, most = (int(value) for value in values.aminmax())
        if least < 0 or most >= limit:
            raise ValueError(
                f"{name} lie between {least} and {most}; they must lie from 0 to {limit - 1}"
            )


def filled(rows: int) -> int:
    """Round up to few sizes: powers of two up to 32, multiples of 32 up to 256, then four sizes
    between two powers of two."""
    if rows <= 32:
        return 1 << (rows - 1).bit_length()
    step = max(32, 1 << (rows - 1).bit_length() - 3)
    return -(-rows // step) * step

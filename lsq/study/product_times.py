"""Milliseconds of this machine's products y [R, P] = x [R, K] W^T in decoding, measured once and
kept in a file.

x has int8 codes; W [P, K] is packed as the decoding engine holds it. A step of decoding reads all
weights of a model in turn, from the cache that holds them all or from memory. So one product is
timed with copies of its weight that take turns, as many bytes together as the model's weights have.
What else a step does (attention, norms, Python) is not in it.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lsq.config import QuantConfig
from lsq.files import json_file
from lsq.files.json_file import check_number, check_text, check_whole, shown
from lsq.native import cache, loader, tiles
from lsq.native.processor import cpu_model
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.program.values import Coded
from lsq.quant.formats import Format, Grain, Int4
from lsq.quant.numbers import FLOAT32, ScaledFormat
from lsq.quant.stored import stored_type
from lsq.quant.tables import integer
from lsq.run.backends import backend

logger = logging.getLogger(__name__)

FORMAT = 1
LARGEST = 2**31
MOST_MEGABYTES = 1024
"""Of copies; more of them are no further from the caches."""
ROUNDS, SECONDS = 9, 1e-3
"""Measurements of a product, and how long each lasts at least."""
FIELD_BITS, LARGEST_CODE = 4, 127
"""Of the engine: widest integers that it multiplies as packed fields, and largest code."""
REMEDY = "delete the file; products are then measured again"
_INT8 = Format(name="activation", bits=8, grain=Grain.TENSOR)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of a step of decoding. Raises ValueError: a field is wrong."""

    form: str
    """Of the weight, as QuantConfig.weight_format names it."""
    rows: int
    """R, as lsq.serving.engine.filled rounds it."""
    outputs: int
    inputs: int

    def __post_init__(self) -> None:
        check_text("form", self.form)
        for name in ("rows", "outputs", "inputs"):
            check_whole(name, getattr(self, name), 1, LARGEST)


@dataclass(frozen=True, kw_only=True)
class Entry(Product):
    """The time of a product."""

    megabytes: int
    """Of all weights that a step reads."""
    milliseconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("megabytes", self.megabytes, 1, MOST_MEGABYTES)
        check_number("milliseconds", self.milliseconds, 1e9)

    @property
    def key(self) -> tuple[Product, int]:
        fields = ("form", "rows", "outputs", "inputs")
        return Product(**{name: getattr(self, name) for name in fields}), self.megabytes


@dataclass(frozen=True)
class ProductTimes:
    """Times of products, of a step that reads so many megabytes of weights."""

    times: Mapping[Product, float]
    megabytes: int

    def milliseconds(self, form: str, rows: int, outputs: int, inputs: int) -> float:
        """Return the time of a product. Raises ValueError: it was not measured."""
        product = Product(form=form, rows=rows, outputs=outputs, inputs=inputs)
        if product not in self.times:
            raise ValueError(
                f"there is no time of {rows} rows times a weight [{outputs}, {inputs}] in {form};"
                " name this product to product_times"
            )
        return self.times[product]


def product_times(
    wanted: Iterable[Product],
    *,
    megabytes: float,
    path: Path | None = None,
    progress: Callable[[int, int], object] = lambda done, all: None,
) -> ProductTimes:
    """Return the times of products, with as many threads as torch has; measure those that the file
    lacks, and write them.

    After an interruption the same call measures what is left. A file that is damaged, or of another
    processor, library or number of threads, is named in a warning and written anew.

    Args:
        wanted: products, in any order.
        megabytes: of all weights that a step of the model reads.
        path: the file; None: default_path().
        progress: called with (products measured, products to measure).

    Raises:
        ValueError: the engine cannot multiply a format as codes, the megabytes are no number, or
            the C++ library is missing.
        OSError: the file cannot be written.
    """
    wanted, path = list(dict.fromkeys(wanted)), path or default_path()
    check_number("megabytes", megabytes, 1e9)
    megabytes = round(min(max(megabytes, 1), MOST_MEGABYTES))
    for form in {product.form for product in wanted}:
        _check_form(form)
    entries = {entry.key: entry for entry in _kept(path)}
    left = [product for product in wanted if (product, megabytes) not in entries]
    left.sort(key=lambda one: (one.outputs, one.inputs))
    memory, done = _memory(megabytes if left else 0), 0
    for _, group in groupby(left, key=lambda one: (one.outputs, one.inputs)):
        products = list(group)
        for product, seconds in _measured(products, megabytes, memory).items():
            entry = Entry(**asdict(product), megabytes=megabytes, milliseconds=1e3 * seconds)
            entries[entry.key] = entry
        write(path, list(entries.values()))
        done += len(products)
        progress(done, len(left))
    found = {product: entries[product, megabytes].milliseconds for product in wanted}
    return ProductTimes(found, megabytes)


def packed_as(form: str, outputs: int, inputs: int) -> PackedWeight:
    """Return a weight of zeros [P, K], packed as the decoding engine holds it on the CPU. Raises
    ValueError: it cannot multiply the format as codes, or the C++ library is missing."""
    _check_form(form)
    chosen, scale = QuantConfig(weight_format=form).weights, torch.ones(outputs)
    if isinstance(chosen, Int4):
        stored = torch.zeros(outputs, chosen.stored_columns(inputs), dtype=torch.int8)
        return PackedWeight.of_int4(stored, scale, inputs)
    number = chosen.number if isinstance(chosen, ScaledFormat) else integer(chosen.bits)
    stored = stored_type(number)
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    if stored.bits <= FIELD_BITS:
        return PackedWeight.of_stored(codes, scale, stored)
    return PackedWeight.of(codes.view(torch.int8), scale)


def _check_form(form: str) -> None:
    """Raise ValueError for a format that the engine does not multiply as codes."""
    quant = QuantConfig(weight_format=form)
    chosen = quant.weights
    fits = quant.coded
    if isinstance(chosen, ScaledFormat):
        stored = stored_type(chosen.number)
        fits = stored.whole and chosen.number.largest / stored.unit <= LARGEST_CODE
        fits &= chosen.scales == FLOAT32 and chosen.grain in (Grain.ROW, Grain.TENSOR)
    if not fits or quant.formats_differ:
        raise ValueError(
            f"decoding does not multiply weights in {form!r} as codes; allowed are 'int8', 'int4'"
            " and whole numbers with a scale for each row or for the tensor, such as 'int3/row' or"
            " 'ternary/row'"
        )


def default_path() -> Path:
    """Return the file of this processor and number of threads in the user's cache folder."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", f"{cpu_model()} {tiles.fastest()}").strip("_")
    return cache.folder("products") / f"{name}_{torch.get_num_threads()}.json"


def write(path: Path, entries: list[Entry]) -> None:
    """Write a file of this processor, whole or not at all. Raises OSError: that fails."""
    json_file.write(path, _head(), "entries", [asdict(entry) for entry in entries])


def read(path: Path) -> list[Entry]:
    """Read a file. Raises ValueError: it is damaged, or of another processor, library or number of
    threads; OSError: it cannot be read."""

    def build(content: Any) -> list[Entry]:
        head = _head()
        json_file.check_fields(content, [*head, "entries"], "")
        for name, here in head.items():
            if content[name] != here:
                raise ValueError(f"{name} is {shown(content[name])}; here it is {shown(here)}")
        return list(
            json_file.sequence(
                content["entries"], "entries", lambda one, at: json_file.record(Entry, one, at)
            )
        )

    return json_file.read(path, build, REMEDY)


def _head() -> dict[str, Any]:
    if not loader.available():
        raise ValueError("products are timed with the C++ library; install g++ and reinstall lsq")
    return {
        "format": FORMAT,
        "processor": cpu_model(),
        "instructions": tiles.fastest(),
        "threads": torch.get_num_threads(),
        "library": loader.function("lsq_sources")(),
    }


def _kept(path: Path) -> list[Entry]:
    try:
        return read(path)
    except FileNotFoundError:
        return []
    except ValueError as error:
        logger.warning("not used: %s", error)
        return []


def _memory(megabytes: int) -> Tensor:
    """Return memory uint8 for the copies of any weight, where a packed weight may begin. It is
    written to, since the system lays all memory that nobody wrote on one page of zeros."""
    size = 3 * 10**6 * megabytes // 2 + tiles.ALIGNMENT
    memory = torch.ones(size, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % tiles.ALIGNMENT :]


def _measured(products: list[Product], megabytes: int, memory: Tensor) -> dict[Product, float]:
    """Return the seconds of products whose weights have one shape, measured in turn."""
    weights = {one.form: packed_as(one.form, one.outputs, one.inputs) for one in products}
    copies = {form: _copies(weight, megabytes, memory) for form, weight in weights.items()}
    runs = {one: _run(one.rows, copies[one.form]) for one in products}
    found: dict[Product, list[float]] = {one: [] for one in products}
    for _ in range(ROUNDS):
        for product, run in runs.items():
            found[product].append(_seconds(run) / len(copies[product.form]))
    return {product: min(seconds) for product, seconds in found.items()}


def _copies(weight: PackedWeight, megabytes: int, memory: Tensor) -> list[PackedWeight]:
    """Return copies of a weight in memory, about so many megabytes together. They hold what is
    there, which does not change the time."""
    size = -(-weight.tiles.nbytes // tiles.ALIGNMENT) * tiles.ALIGNMENT
    count = round(10**6 * megabytes / size)
    places = (memory[size * i :][: weight.tiles.nbytes] for i in range(count))
    return [replace(weight, tiles=place) for place in places] or [weight]


def _run(rows: int, weights: list[PackedWeight]) -> Callable[[], None]:
    """Return a function that multiplies rows by each of the weights."""
    one = weights[0]
    codes, out = torch.ones(rows, one.inner, dtype=torch.int8), torch.empty(rows, one.columns)
    x = Coded(format=_INT8, codes=codes, scale=torch.ones(1))
    calls = [(PackedProject(x=x, weight=weight, out=out), []) for weight in weights]
    return backend("cpu").prepare(calls)


def _seconds(run: Callable[[], None]) -> float:
    """Return the seconds of a call; of one thread those that the processor gave it, which hardly
    depend on what else runs."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin, calls = clock(), 0
    while calls == 0 or clock() - begin < SECONDS:
        run()
        calls += 1
    return (clock() - begin) / calls

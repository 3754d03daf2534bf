"""How each product is run: the tuned entry where there is one, the default otherwise; both are counted.

The CPU's operations ask `configuration_for` for every product, so that it is a dictionary lookup. Which files are used
is settled when the first product is asked for; `set_files` changes it, and goes before memory is planned.
"""

import bisect
import copy
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from lsq.gemm import configuration_file, scratch, search
from lsq.gemm.configuration import ConfigurationFile, CpuConfiguration, Entry
from lsq.gemm.product_key import ProductKey, rounded_tokens
from lsq.gemm.search import Found
from lsq.gemm.validators import Validators

logger = logging.getLogger(__name__)


class Use:
    """How often a product was asked for."""

    __slots__ = ("calls", "configuration", "entry", "key", "seconds")

    def __init__(self, key: ProductKey, entry: Entry | None) -> None:
        self.key = key
        self.entry = entry
        """What serves it: the entry of its key, or of another batch size; None: untuned."""
        self.configuration = CpuConfiguration.default(key.op) if entry is None else entry.configuration
        self.calls = 0
        self.seconds = 0.0


class Table:
    """The entries that hold for one device, and how often each product was asked for. Threads may share it.

    Args:
        here: the device.
        found: its files, in the order of their precedence.
    """

    def __init__(self, here: Validators, found: Sequence[Found] = ()) -> None:
        self.here = here
        self.found = tuple(found)
        self._entries: dict[ProductKey, Entry] = {}
        self._families: dict[tuple, list[Entry]] = {}
        self._uses: dict[tuple | ProductKey, Use] = {}
        self._lock = threading.Lock()
        for each in self.used:
            for entry in each.file.entries:
                self._entries.setdefault(entry.key, entry)
        for entry in sorted(self._entries.values(), key=lambda entry: entry.key.tokens):
            self._families.setdefault(entry.key.family, []).append(entry)

    @property
    def used(self) -> list[Found]:
        """The files that the entries come from."""
        return [each for each in self.found if each.refusal is None]

    @property
    def file(self) -> ConfigurationFile:
        """All entries as one file."""
        return ConfigurationFile(validators=self.here, entries=tuple(self._entries.values()))

    def lookup(self, key: ProductKey) -> Entry | None:
        """The entry that serves a product; counted as a hit or a miss.

        On the CPU, an entry serves other batch sizes as well: see `_nearest_entry`. Algorithms of cuBLASLt do not.
        """
        with self._lock:
            use = self._uses.get(key) or self._first_use(key, key)
            use.calls += 1
        return use.entry

    def configuration(self, op: str, m: int, n: int, k: int, layout: str) -> CpuConfiguration:
        """How the CPU runs the int8 product of an operation; counted.

        Raises:
            ValueError: there is no such product.
        """
        asked = (op, m, n, k, layout)
        with self._lock:
            use = self._uses.get(asked) or self._first_use(asked, ProductKey.of(*asked))
            use.calls += 1
        return use.configuration

    def entry(self, key: ProductKey) -> Entry | None:
        """As `lookup`, but not counted."""
        return self._entries.get(key.rounded())

    def refuse(self, key: ProductKey) -> None:
        """Count a product as missed from now on: its entry turned out not to run."""
        with self._lock:
            use = self._uses.get(key) or self._first_use(key, key)
            use.entry, use.configuration = None, CpuConfiguration.default(key.op)

    def _first_use(self, asked: tuple | ProductKey, key: ProductKey) -> Use:
        rounded = key.rounded()
        use = self._uses.get(rounded)
        if use is None:
            use = self._uses[rounded] = Use(rounded, self._entries.get(rounded) or self._nearest_entry(rounded))
        self._uses[asked] = use
        return use

    def add_seconds(self, op: str, m: int, n: int, k: int, layout: str, seconds: float) -> None:
        """Say how long a product took whose configuration was asked for, for the report.

        Raises:
            ValueError: there is no such product.
        """
        asked = (op, m, n, k, layout)
        with self._lock:
            (self._uses.get(asked) or self._first_use(asked, ProductKey.of(*asked))).seconds += seconds

    def largest_scratch(self, op: str, m: int, n: int, k: int, layout: str) -> int:
        """Bytes of scratch memory that suffice for a product, and for the same in any smaller batch.

        They do not fall when the batch grows.

        Raises:
            ValueError: there is no such product.
        """
        key = ProductKey.of(op, m, n, k, layout)
        largest = scratch.size(key, CpuConfiguration.default(op))
        family = self._families.get(key.family, ())
        at_least = bisect.bisect_left(family, rounded_tokens(key.tokens), key=lambda entry: entry.key.tokens)
        for place, entry in enumerate(family[: at_least + 1]):
            # The last entry of all serves every larger batch, each other one those up to its own size.
            most = key.tokens if place == len(family) - 1 else min(entry.key.tokens, key.tokens)
            largest = max(largest, scratch.size(key.with_tokens(most), entry.configuration))
        return largest

    def _nearest_entry(self, key: ProductKey) -> Entry | None:
        """The entry for the next larger batch, or for the largest of all: it serves where there is none for this one.

        Every configuration of the CPU runs every batch size, unless its sums would not be exact.
        """
        family = self._families.get(key.family)
        if not family or self.here.kind != "cpu":
            return None
        place = bisect.bisect_left(family, key.tokens, key=lambda entry: entry.key.tokens)
        entry = family[min(place, len(family) - 1)]
        try:
            entry.configuration.check_key(key)
        except ValueError:
            return None
        return entry

    def uses(self) -> list[Use]:
        """What was asked for so far, each product once."""
        with self._lock:
            return [copy.copy(use) for use in dict.fromkeys(self._uses.values())]


_lock = threading.Lock()
_generation = 0
_explicit: tuple[Path, ...] | None = None
_tables: dict[str, Table] = {}
_warned: set[tuple[Path, str]] = set()


def set_files(paths: Sequence[Path] | None) -> None:
    """Use these files and no others from now on, the first before the next; none at all if empty; None: search again.

    Files of CPUs and of GPUs may be mixed. What was counted so far is forgotten.

    Raises:
        ValueError: a file is damaged or was made for another device; the message names what differs.
        OSError: a file cannot be read.
        RuntimeError: a file is for a GPU, and there is none.
    """
    global _explicit, _generation
    explicit = None if paths is None else tuple(map(Path, paths))
    made = {}
    if explicit is not None:
        by_kind: dict[str, list[Path]] = {"cpu": []}
        for path in explicit:
            by_kind.setdefault(configuration_file.read(path).validators.kind, []).append(path)
        for kind, chosen in by_kind.items():
            here = search.here(kind)
            made[kind] = Table(here, search.find(here, chosen))
    with _lock:
        _explicit = explicit
        _generation += 1
        _tables.clear()
        _tables.update(made)


def generation() -> int:
    """Another number whenever other files are used."""
    return _generation


def table(kind: str = "cpu") -> Table:
    """The table of the CPU, or of the current GPU, loaded when it is first wanted.

    Raises:
        ValueError: no such kind.
        RuntimeError: there is no GPU, or no libcublasLt.
    """
    found = _tables.get(kind)
    if found is None:
        with _lock:
            if kind not in _tables:
                _tables[kind] = load(search.here(kind)) if _explicit is None else Table(search.here(kind))
            found = _tables[kind]
    return found


def load(here: Validators) -> Table:
    """A table of the files that are searched; files that are refused are warned of, once in a process.

    Not warned of: those for other kinds of device; in the package, those for other devices; those with another in the
    same folder that holds.
    """
    made = Table(here, search.find(here))
    served = {each.source for each in made.used}
    refused = [each for each in made.found if _worth_a_warning(each, here, served)]
    news = [each for each in refused if (each.path, each.refusal) not in _warned]
    _warned.update((each.path, each.refusal) for each in news)
    if news:
        logger.warning(
            "not used: %s. Products that no other file has run untuned: tune them here (`lsq tune`), or delete it.",
            "; ".join(f"{each.path}: {each.refusal}" for each in news),
        )
    return made


def _worth_a_warning(each: Found, here: Validators, served: set[str]) -> bool:
    if each.refusal is None:
        return False
    if each.file is None:
        return True
    expected = each.file.validators.kind != here.kind or (each.source == "package" and each.foreign)
    return not expected and each.source not in served


def configuration_for(op: str, m: int, n: int, k: int, layout: str) -> CpuConfiguration:
    """How the CPU runs the int8 product of an operation, out [M, N] = a times b; counted.

    Args:
        op: one of product_key.OPERATIONS.
        m, n, k: rows and columns of the result, inner dimension.
        layout: how a and b lie, one of product_key.LAYOUTS.

    Raises:
        ValueError: there is no such product.
    """
    return table().configuration(op, m, n, k, layout)


def add_seconds(op: str, m: int, n: int, k: int, layout: str, seconds: float) -> None:
    """Say how long a product of the CPU took whose configuration was asked for, for the report.

    Raises:
        ValueError: there is no such product.
    """
    table().add_seconds(op, m, n, k, layout, seconds)


def largest_scratch(op: str, m: int, n: int, k: int, layout: str) -> int:
    """Bytes of scratch memory that suffice for a product of the CPU and for the same in any smaller batch.

    Raises:
        ValueError: there is no such product.
    """
    return table().largest_scratch(op, m, n, k, layout)

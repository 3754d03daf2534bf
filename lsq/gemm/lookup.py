"""How each product is run: the tuned entry where there is one, the default otherwise; both are
counted.

The CPU's operations ask for every product, so that it is a dictionary lookup. Which files are used
is settled when the first product is asked for; `set_files` changes it, and goes before memory is
planned.
"""

import bisect
import copy
import dataclasses
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from lsq.gemm import configuration_file, cpu_product, device
from lsq.gemm.configuration import ONEDNN, Configuration, CpuConfiguration, Entry
from lsq.gemm.configuration_file import ConfigurationFile, Found
from lsq.gemm.default_tile import default_tile
from lsq.gemm.device import Validators, difference
from lsq.gemm.product_key import MATMUL, ProductKey, rounded_tokens
from lsq.native import tiles

logger = logging.getLogger(__name__)


class Use:
    """How often a product was asked for, and how it is run."""

    __slots__ = ("calls", "configuration", "entry", "key", "seconds")

    def __init__(self, key: ProductKey, entry: Entry | None, default: Configuration | None) -> None:
        self.key = key
        """As it stands in files: with its number of tokens rounded."""
        self.entry = entry
        """What serves it: the entry of its key, or of another batch size; None: untuned."""
        self.configuration = default if entry is None else entry.configuration
        """None: as cuBLASLt proposes first."""
        self.calls = 0
        self.seconds = 0.0

    @property
    def hit(self) -> bool:
        """Whether there is an entry for this very product."""
        return self.entry is not None and self.entry.key == self.key


class Table:
    """The entries that hold for one device, and how often each product was asked for.

    Threads may share it.

    Args:
        here: the device.
        found: its files, in the order of their precedence.
    """

    def __init__(self, here: Validators, found: Sequence[Found] = ()) -> None:
        self.here = here
        self.found = tuple(found)
        self._entries: dict[ProductKey, Entry] = {}
        self._families: dict[tuple, list[Entry]] = {}
        self._uses: dict[ProductKey, Use] = {}
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

    def use(self, key: ProductKey) -> Use:
        """How a product is run; counted.

        Of operations, an entry serves other batch sizes as well: see `_nearest_entry`.
        """
        with self._lock:
            use = self._uses.get(key)
            if use is None:
                rounded = key.rounded()
                use = self._uses[key] = self._uses.setdefault(rounded, self._found(rounded))
            use.calls += 1
        return use

    def configuration(self, key: ProductKey) -> Configuration | None:
        """How `use` would say that a product is run; not counted."""
        with self._lock:
            return (self._uses.get(key) or self._found(key.rounded())).configuration

    def add_seconds(self, use: Use, seconds: float) -> None:
        """Say how long a product took, for the report."""
        with self._lock:
            use.seconds += seconds

    def uses(self) -> list[Use]:
        """What was asked for so far, each product once."""
        with self._lock:
            return [copy.copy(use) for use in dict.fromkeys(self._uses.values())]

    def largest_scratch(self, key: ProductKey) -> int:
        """Bytes of scratch memory that suffice for a product of the CPU, and for the same in any
        smaller batch.

        They do not fall when the batch grows.
        """
        largest = cpu_product.scratch_bytes(key, CpuConfiguration.default(key))
        family = self._families.get(key.family, ())
        at_least = bisect.bisect_left(
            family, rounded_tokens(key.tokens), key=lambda entry: entry.key.tokens
        )
        for place, entry in enumerate(family[: at_least + 1]):
            # The last entry of all serves every larger batch, each other one those up to its own
            # size.
            most = key.tokens if place == len(family) - 1 else min(entry.key.tokens, key.tokens)
            largest = max(
                largest, cpu_product.scratch_bytes(key.with_tokens(most), entry.configuration)
            )
        return largest

    def _found(self, key: ProductKey) -> Use:
        entry = self._entries.get(key) or self._nearest_entry(key)
        cpu = self.here.kind == "cpu"
        return Use(
            key, entry, CpuConfiguration.default(key) if cpu else default_tile(key, self.here.sm)
        )

    def _nearest_entry(self, key: ProductKey) -> Entry | None:
        """The entry for the next larger batch, or for the largest of all: it serves where there is
        none for this one.

        Every configuration runs every batch size, but algorithms of cuBLASLt: those say that none
            of its tiles is best.
        """
        family = self._families.get(key.family)
        if not family or key.op == MATMUL:
            return None
        place = bisect.bisect_left(family, key.tokens, key=lambda entry: entry.key.tokens)
        return family[min(place, len(family) - 1)]


_lock = threading.Lock()
_generation = 0
_explicit = False
"""Whether the files were named."""
_tables: dict[str, Table] = {}
_warned: set[tuple[Path, str]] = set()


def set_files(paths: Sequence[Path] | None) -> None:
    """Use these files and no others from now on, the first before the next; none at all if empty;
    None: search again.

    Files of CPUs and of GPUs may be mixed. What was counted so far is forgotten.

    Raises:
        ValueError: a file is damaged or was made for another device; the message names what
            differs.
        OSError: a file cannot be read.
        RuntimeError: a file is for a GPU, and there is none.
    """
    global _explicit, _generation
    found: dict[str, list[Found]] = {}
    for path in map(Path, paths or ()):
        file = configuration_file.read(path)
        refusal = difference(file.validators, device.here(file.validators.kind)) or missing_kernel(
            file
        )
        if refusal is not None:
            raise ValueError(f"{path}: {refusal}; tune here (`lsq tune`), or leave the file out")
        found.setdefault(file.validators.kind, []).append(
            Found(path=path, source="explicit", file=file, refusal=None)
        )
    made = {kind: Table(device.here(kind), chosen) for kind, chosen in found.items()}
    with _lock:
        _explicit = paths is not None
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
                _tables[kind] = Table(device.here(kind)) if _explicit else load(device.here(kind))
            found = _tables[kind]
    return found


def tables() -> list[Table]:
    """Those that were wanted so far, the CPU's first."""
    with _lock:
        return [_tables[kind] for kind in sorted(_tables)]


def missing_kernel(file: ConfigurationFile) -> str | None:
    """The first kernel in a file of a CPU that cannot run here, in words."""
    for number, entry in enumerate(file.entries):
        kernel = getattr(entry.configuration, "kernel", ONEDNN)
        if kernel != ONEDNN and kernel not in tiles.usable():
            allowed = ", ".join(map(repr, (ONEDNN, *tiles.usable())))
            return (
                f"entries[{number}].configuration.kernel is {kernel!r}, which cannot run here;"
                f" allowed: {allowed}"
            )
    return None


def load(here: Validators) -> Table:
    """A table of the files that are searched; files that are refused are warned of, once in a
    process.

    Not warned of: those for other kinds of device; in the package, those for other devices; those
    with another in the same folder that holds.
    """
    found = configuration_file.find(here)
    made = Table(
        here,
        [
            dataclasses.replace(each, refusal=each.refusal or missing_kernel(each.file))
            for each in found
        ],
    )
    served = {each.source for each in made.used}
    refused = [each for each in made.found if _worth_a_warning(each, here, served)]
    news = [each for each in refused if (each.path, each.refusal) not in _warned]
    _warned.update((each.path, each.refusal) for each in news)
    if news:
        logger.warning(
            "not used: %s. Products that no other file has run untuned: tune them here (`lsq"
            " tune`), or delete it.",
            "; ".join(f"{each.path}: {each.refusal}" for each in news),
        )
    return made


def _worth_a_warning(each: Found, here: Validators, served: set[str]) -> bool:
    if each.refusal is None or each.file is None:
        return each.refusal is not None
    theirs = each.file.validators
    names = ("device", "features")  # clouds call many processors by one name
    another = any(getattr(theirs, name, None) != getattr(here, name, None) for name in names)
    expected = theirs.kind != here.kind or (each.source == "package" and another)
    return not expected and each.source not in served

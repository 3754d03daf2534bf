"""Which configuration runs each product: the entry of a file, or the rule.

Files are read when the first product is looked up. `set_files` changes them; call it before memory
is planned.
"""

import bisect
import copy
import dataclasses
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from lsq.gemm import configuration_file, device
from lsq.gemm.configuration import Configuration, CpuConfiguration, Entry
from lsq.gemm.configuration_file import ConfigurationFile, SearchedFile
from lsq.gemm.default_tile import default_tile
from lsq.gemm.device import Validators, difference
from lsq.gemm.product_key import MATMUL, ProductKey
from lsq.native import tiles

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Use:
    """A product that was looked up, and how it runs."""

    key: ProductKey
    """As it stands in files: with its number of tokens rounded."""
    entry: Entry | None
    """Of its key, or of another batch size; None: untuned."""
    default: Configuration | None
    """The rule; None: as cuBLASLt proposes first."""

    @property
    def configuration(self) -> Configuration | None:
        """How it runs; None: as cuBLASLt proposes first."""
        return self.default if self.entry is None else self.entry.configuration

    @property
    def hit(self) -> bool:
        """Whether there is an entry for this very product."""
        return self.entry is not None and self.entry.key == self.key


class Table:
    """The entries that hold for one device, and the products that were looked up.

    Threads may share it.

    Args:
        here: the device.
        files: its files, in the order of their precedence.
    """

    def __init__(self, here: Validators, files: Sequence[SearchedFile] = ()) -> None:
        self.here = here
        self.used = [each for each in files if each.refusal is None]
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
    def file(self) -> ConfigurationFile:
        """All entries as one file."""
        return ConfigurationFile(validators=self.here, entries=tuple(self._entries.values()))

    def use(self, key: ProductKey) -> Use:
        """How a product runs; `uses` lists it from now on.

        An entry of an operation serves other batch sizes, too: see `_nearest_entry`.
        """
        with self._lock:
            key = key.rounded()
            if key not in self._uses:
                self._uses[key] = self._look_up(key)
            return self._uses[key]

    def configuration(self, key: ProductKey) -> Configuration | None:
        """How `use` says that a product runs; `uses` does not list it."""
        with self._lock:
            key = key.rounded()
            return (self._uses.get(key) or self._look_up(key)).configuration

    def uses(self) -> list[Use]:
        """The products looked up by `use` so far."""
        with self._lock:
            return [copy.copy(use) for use in self._uses.values()]

    def _look_up(self, key: ProductKey) -> Use:
        entry = self._entries.get(key) or self._nearest_entry(key)
        if self.here.kind == "cpu":
            return Use(key, entry, CpuConfiguration.default())
        return Use(key, entry, default_tile(key, self.here.sm))

    def _nearest_entry(self, key: ProductKey) -> Entry | None:
        """The entry for the next larger batch, or for the largest of all.

        Every configuration runs every batch size, except algorithms of cuBLASLt: those say that
        none of the tiles is best.
        """
        family = self._families.get(key.family)
        if not family or key.op == MATMUL:
            return None
        number = bisect.bisect_left(family, key.tokens, key=lambda entry: entry.key.tokens)
        return family[min(number, len(family) - 1)]


# Files decide for the whole process, for all layers and threads.
_lock = threading.Lock()
_generation = 0
_explicit = False  # whether the files were named
_tables: dict[str, Table] = {}
_warned: set[tuple[Path, str]] = set()


def set_files(paths: Sequence[Path] | None) -> None:
    """Use these files and no others from now on, the first before the next; none at all if empty;
    None: search the user's folder again.

    Files of CPUs and of GPUs may be mixed. `Table.uses` begins anew.

    Raises:
        ValueError: a file is damaged or was made for another device; the message names what
            differs.
        OSError: a file cannot be read.
        RuntimeError: a file is for a GPU, and there is none.
    """
    global _explicit, _generation
    files: dict[str, list[SearchedFile]] = {}
    for path in map(Path, paths or ()):
        file = configuration_file.read(path)
        here = device.here(file.validators.kind)
        refusal = difference(file.validators, here) or missing_kernel(file)
        if refusal is not None:
            raise ValueError(f"{path}: {refusal}; tune here (`lsq tune`), or leave the file out")
        files.setdefault(file.validators.kind, []).append(
            SearchedFile(path=path, file=file, refusal=None)
        )
    tables = {kind: Table(device.here(kind), chosen) for kind, chosen in files.items()}
    with _lock:
        _explicit = paths is not None
        _generation += 1
        _tables.clear()
        _tables.update(tables)


def generation() -> int:
    """Another number whenever other files are used."""
    return _generation


def table(kind: str = "cpu") -> Table:
    """The table of the CPU, or of the current GPU, loaded when it is first wanted.

    Raises:
        ValueError: no such kind.
        RuntimeError: there is no GPU, or no libcublasLt.
    """
    loaded = _tables.get(kind)
    if loaded is None:
        with _lock:
            if kind not in _tables:
                _tables[kind] = Table(device.here(kind)) if _explicit else load(device.here(kind))
            loaded = _tables[kind]
    return loaded


def tables() -> list[Table]:
    """The tables loaded so far, the CPU's first."""
    with _lock:
        return [_tables[kind] for kind in sorted(_tables)]


def missing_kernel(file: ConfigurationFile) -> str | None:
    """The first kernel in a file of a CPU that cannot run here, in words."""
    for number, entry in enumerate(file.entries):
        kernel = getattr(entry.configuration, "kernel", None)
        if kernel is not None and kernel not in tiles.usable():
            allowed = ", ".join(map(repr, tiles.usable()))
            return (
                f"entries[{number}].configuration.kernel is {kernel!r}, which cannot run here;"
                f" allowed: {allowed}"
            )
    return None


def load(here: Validators) -> Table:
    """A table of the user's and the package's files, with one warning of those that are refused.

    Files for other kinds of device are expected, and so are all others beside a file that is used,
    and those of the package for other devices.
    """
    files = [
        dataclasses.replace(each, refusal=each.refusal or missing_kernel(each.file))
        for each in configuration_file.search(here)
    ]
    loaded = Table(here, files)
    news = [
        each
        for each in files
        if each.refusal is not None
        and not (each.shipped and each.file is not None)
        and (each.path, each.refusal) not in _warned
        and (each.file is None or (each.file.validators.kind == here.kind and not loaded.used))
    ]
    _warned.update((each.path, each.refusal) for each in news)
    if news:
        logger.warning(
            "not used: %s. The default runs products that no other file has: tune them here (`lsq"
            " tune`, on a GPU), or delete it.",
            "; ".join(f"{each.path}: {each.refusal}" for each in news),
        )
    return loaded

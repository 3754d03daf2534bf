"""The configuration of each GPU product: from the entry of a file, or from the rule.

Files are read when the first product is looked up. `set_files` changes them; call it before memory
is planned.
"""

import bisect
import copy
import dataclasses
import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from lsq.gemm import configuration_file, cuda
from lsq.gemm.configuration import Configuration, Entry, TileConfiguration, default_tile
from lsq.gemm.configuration_file import ConfigurationFile, SearchedFile, Validators, difference
from lsq.gemm.operations import TILED_ALONE, is_long
from lsq.gemm.product_key import MATMUL, ProductKey
from lsq.native.geometry import multiprocessors

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Use:
    """A product that was looked up, and how it runs."""

    key: ProductKey
    """The key in files, with a rounded number of tokens."""
    entry: Entry | None
    """The entry of this key, or of another batch size; None: untuned."""
    default: Configuration | None
    """By the rule; None: the first proposal of cuBLASLt."""

    @property
    def configuration(self) -> Configuration | None:
        """How it runs; None: the first proposal of cuBLASLt."""
        return self.default if self.entry is None else self.entry.configuration

    @property
    def hit(self) -> bool:
        """Whether there is an entry for exactly this product."""
        return self.entry is not None and self.entry.key == self.key


class Table:
    """The entries that are valid for one GPU, and the products that were looked up. Threads may
    share it. `here`: the GPU. `files`: its files; the first that has an entry counts."""

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
        """Return how a product runs, and list it in `uses` from now on. An entry of an operation
        serves other batch sizes, too: see `_nearest_entry`."""
        with self._lock:
            key = key.rounded()
            if key not in self._uses:
                self._uses[key] = self._look_up(key)
            return self._uses[key]

    def configuration(self, key: ProductKey) -> Configuration | None:
        """Return the configuration that `use` gives, without listing the product in `uses`."""
        with self._lock:
            key = key.rounded()
            return (self._uses.get(key) or self._look_up(key)).configuration

    def uses(self) -> list[Use]:
        """Return the products that `use` has looked up so far."""
        with self._lock:
            return [copy.copy(use) for use in self._uses.values()]

    def _look_up(self, key: ProductKey) -> Use:
        entry = self._entries.get(key) or self._nearest_entry(key)
        return Use(key, entry, default_tile(key, self.here.sm, multiprocessors()))

    def _nearest_entry(self, key: ProductKey) -> Entry | None:
        """Return the entry for the next larger batch, or else for the largest.

        A tile runs every batch size. An algorithm of cuBLASLt runs its own size alone; for other
        sizes its entry says that no tile is best.
        """
        family = self._families.get(key.family)
        if not family or key.op == MATMUL:
            return None
        number = bisect.bisect_left(family, key.tokens, key=lambda entry: entry.key.tokens)
        return family[min(number, len(family) - 1)]


def set_files(paths: Sequence[Path] | None) -> None:
    """Use these files and no others from now on; an earlier one takes precedence. [] uses none;
    None searches the user's folder again. `Table.uses` starts empty. Raises ValueError: a file is
    damaged or for another GPU (the message names the difference); OSError: a file cannot be read;
    RuntimeError: there is no GPU."""
    cuda.files.use(None if paths is None else [_named_file(Path(path)) for path in paths])


def _named_file(path: Path) -> SearchedFile:
    file = configuration_file.read(path)
    refusal = difference(file.validators, configuration_file.here())
    if refusal is not None:
        raise ValueError(f"{path}: {refusal}; tune here (`lsq tune`), or leave the file out")
    return SearchedFile(path=path, file=file, refusal=None)


def table() -> Table:
    """Return the table of the current GPU, loaded by the first call. Raises RuntimeError: there is
    no GPU, or no libcublasLt."""
    files = cuda.files
    with files.lock:
        if files.table is None:
            gpu = configuration_file.here()
            files.table = load(gpu) if files.named is None else Table(gpu, files.named)
        return files.table


def loaded() -> Table | None:
    """Return the table; None: no product was looked up yet."""
    return cuda.files.table


def cuda_tile(op: str, m: int, n: int, k: int) -> TileConfiguration | None:
    """Return the tile of a kernel of lsq that multiplies codes [M, K] x [N, K] for `op`, with its
    epilogue; None: cuBLASLt multiplies, or nothing, if m, n or k is 0.

    Operations call it for their scratch memory, and again for their launches. The answer depends on
    the shape, and with a GPU on its files. `op`: one of TILED and TILED_ALONE. Raises ValueError:
    there is no such product.
    """
    if not min(m, n, k) or is_long(op, k):
        return None
    generation, forced, tile = cuda.choices()
    if forced and (tile or op not in TILED_ALONE):
        return tile
    return _tuned_tile(generation, op, m, n, k)


@functools.lru_cache(maxsize=4096)
def _tuned_tile(generation: int, op: str, m: int, n: int, k: int) -> TileConfiguration | None:
    key = ProductKey(op=op, m=m, n=n, k=k)
    try:
        found = table()
    except RuntimeError:  # no GPU: a program is planned, or runs in the emulator
        return default_tile(key)
    if op in TILED_ALONE:
        return default_tile(key, found.here.sm, multiprocessors())
    configuration = found.configuration(key)
    if not isinstance(configuration, TileConfiguration):
        return None  # TunedChoice lists it when it looks up the algorithm
    found.use(key)
    return configuration


def load(gpu: Validators) -> Table:
    """Make a table of the user's and the package's files, with one warning that names refused
    files.

    It does not name files that are readable, but for other GPUs, if they come with the package or
    another file is used.
    """
    files = configuration_file.search(gpu)
    loaded = Table(gpu, files)
    news = [
        each
        for each in files
        if each.refusal is not None
        and not (each.shipped and each.file is not None)
        and (each.file is None or not loaded.used)
    ]
    if news:
        logger.warning(
            "not used: %s. The default runs products that no other file has: tune them here (`lsq"
            " tune`), or delete it.",
            "; ".join(f"{each.path}: {each.refusal}" for each in news),
        )
    return loaded

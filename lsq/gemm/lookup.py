"""Which configuration runs each product of a GPU: the entry of a file, or the rule.

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
    """The entries that hold for one GPU, and the products that were looked up.

    Threads may share it.

    `here`: the GPU. `files`: its files, in the order of their precedence.
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


def set_files(paths: Sequence[Path] | None) -> None:
    """Use these files and no others from now on, the first before the next; none at all if empty;
    None: search the user's folder again. `Table.uses` begins anew. Raises ValueError: a file is
    damaged or was made for another GPU; the message names what differs; OSError: a file cannot be
    read; RuntimeError: there is no GPU."""
    cuda.files.use(None if paths is None else [_named_file(Path(path)) for path in paths])


def _named_file(path: Path) -> SearchedFile:
    file = configuration_file.read(path)
    refusal = difference(file.validators, configuration_file.here())
    if refusal is not None:
        raise ValueError(f"{path}: {refusal}; tune here (`lsq tune`), or leave the file out")
    return SearchedFile(path=path, file=file, refusal=None)


def table() -> Table:
    """The table of the current GPU, loaded when it is first wanted. Raises RuntimeError: there is
    no GPU, or no libcublasLt."""
    files = cuda.files
    with files.lock:
        if files.table is None:
            gpu = configuration_file.here()
            files.table = load(gpu) if files.named is None else Table(gpu, files.named)
        return files.table


def loaded() -> Table | None:
    """The table, if a product was looked up."""
    return cuda.files.table


def cuda_tile(op: str, m: int, n: int, k: int) -> TileConfiguration | None:
    """The tile of a kernel of lsq that multiplies codes [M, K] x [N, K] for `op`, one of TILED
    and TILED_ALONE, and applies the epilogue; None: cuBLASLt multiplies. Operations ask for
    their scratch memory, and again for launches. The answer depends on the shape and the files
    of the GPU that is here; without a GPU, on the shape. m, n or k is 0 where there is nothing
    to multiply. Raises ValueError: there is no such product."""
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
    except RuntimeError:  # no GPU: programs are planned, or run in the emulator
        return default_tile(key)
    if op in TILED_ALONE:
        return default_tile(key, found.here.sm)
    configuration = found.configuration(key)
    if not isinstance(configuration, TileConfiguration):
        return None  # products of cuBLASLt are listed where their algorithms are looked up
    found.use(key)
    return configuration


def load(gpu: Validators) -> Table:
    """A table of the user's and the package's files, with one warning of those that are refused.

    All others beside a file that is used are expected, and so are those of the package for other
    GPUs.
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

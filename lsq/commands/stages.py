"""Stages of a long job, which goes on after an interruption; each stage has a folder of its own.

A folder's marker, lsq-stage.json, names the stage that made its files. It has the stage's key
(options and checksums of what the stage reads), whether the stage is finished, and checksums of its
files. A finished stage is skipped if its key is the same. Only files that a marked stage makes are
ever removed; all other files in its folder stay.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lsq.config import QuantConfig
from lsq.config.quantization import CONSTANT, RENAMED
from lsq.files import PARTIAL, json_file, write_text

MARKER = "lsq-stage.json"


@dataclass(frozen=True, kw_only=True)
class Marker:
    stage: str
    key: dict
    finished: bool
    files: dict = field(default_factory=dict)
    """Name -> SHA-256 in hexadecimal; empty if files may change."""

    def __post_init__(self):
        for name, kind in (("stage", str), ("key", dict), ("finished", bool), ("files", dict)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}; it must be of type {kind.__name__}")


def read_marker(folder: Path) -> Marker | None:
    """Read the marker in a folder, None if it has none; ValueError if it is damaged."""
    path = folder / MARKER
    if not path.exists():
        return None
    remedy = f"delete {folder}, or choose another folder"
    return json_file.read(path, lambda content: json_file.record(Marker, content, ""), remedy)


def write_json(path: Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A folder and what a stage makes in it."""

    name: str
    folder: Path
    makes: tuple[str | re.Pattern, ...]
    """Names of files, or patterns of names."""

    def made(self) -> list[Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        patterns = [re.escape(name) if isinstance(name, str) else name for name in self.makes]
        return sorted(p for p in paths if any(re.fullmatch(made, p.name) for made in patterns))

    def check_own(self) -> Marker | None:
        """Return the stage's marker, or None; ValueError if files of another origin are there."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; choose another one")
        found = read_marker(self.folder)
        if found is not None and found.stage != self.name:
            raise ValueError(
                f"{self.folder} holds what the stage {found.stage!r} made, not {self.name!r};"
                " choose another folder"
            )
        others = self.made() if found is None else []
        if others:
            raise ValueError(
                f"{self.folder} holds {others[0].name}, which this command did not make (there is"
                f" no {MARKER}) and would replace; choose another folder, or move it away"
            )
        return found

    def mark(self, key: dict, *, finished: bool, files: dict[str, str] | None = None) -> None:
        """Write the marker into the folder; a missing folder is made."""
        self.check_own()
        self.folder.mkdir(parents=True, exist_ok=True)
        marker = Marker(stage=self.name, key=key, finished=finished, files=files or {})
        write_json(self.folder / MARKER, asdict(marker))

    def empty(self, key: dict) -> None:
        self.mark(key, finished=False)
        self._unlink_made()

    def remove(self) -> None:
        """Remove the files that this stage made, its marker, and its folder if that is empty."""
        if self.check_own() is not None:
            self._unlink_made()
            (self.folder / MARKER).unlink()
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _unlink_made(self) -> None:
        for path in self.made():
            if path.is_symlink() or not path.is_dir():
                path.unlink()

    def is_done(self, key: dict) -> bool:
        marker = self.check_own()
        if marker is None or not marker.finished or differences(marker.key, key):
            return False
        paths = {self.folder / name: digest for name, digest in marker.files.items()}
        return all(path.is_file() and file_digest(path) == paths[path] for path in paths)


def run_stage(
    stage: Stage, key: dict, work: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    """Call `work(folder)` unless the stage is done. Old files stay until all new ones are made."""
    if stage.is_done(key):
        say(f"{stage.name}: already done")
        return
    stage.folder.parent.mkdir(parents=True, exist_ok=True)
    name = f".{stage.folder.name}{PARTIAL}"
    partial = replace(stage, folder=stage.folder.with_name(name))
    partial.empty(key)
    try:
        work(partial.folder)
        files = {path.name: file_digest(path) for path in partial.made()}
        stage.empty(key)
        for name in files:
            (partial.folder / name).replace(stage.folder / name)
        stage.mark(key, finished=True, files=files)
    finally:
        partial.remove()


def differences(before: dict, now: dict) -> list[str]:
    """List the differences of two keys, such as "--lr: 0.1 before, 0.2 now". A text, {"file": path,
    "sha256": checksum}, is compared by its checksum. Dropped options of version 0.1 do not
    count."""
    before = _of_this_version(before, now)
    names = sorted(before.keys() | now.keys())
    changed = [name for name in names if _compared(before.get(name)) != _compared(now.get(name))]
    return [
        f"{name}: {_shown(before.get(name))} before, {_shown(now.get(name))} now"
        for name in changed
    ]


def _of_this_version(before: dict, now: dict) -> dict:
    """Adapt an earlier key to options of this version, unless `now` has options of 0.1. Constant
    options are dropped; --lsq-clip-init takes the place of two initial clips of equal value."""
    constant, inits = (
        {f"--lsq-{name.replace('_', '-')}" for name in names} for names in (CONSTANT, RENAMED)
    )
    left = {name: value for name, value in before.items() if name in now or name not in constant}
    if inits & before.keys() and not inits & now.keys():
        first, *others = [left.pop(name, None) or QuantConfig.clip_init for name in inits]
        if first != QuantConfig.clip_init and all(other == first for other in others):
            left.setdefault("--lsq-clip-init", first)
    return left


def _compared(value: object) -> object:
    return value.get("sha256") if isinstance(value, dict) else value


def _shown(value: object) -> str:
    if value is None or value is True:
        return "not given" if value is None else "given"
    if isinstance(value, dict):
        return f"{value.get('file')} (its text has the checksum {str(value.get('sha256'))[:8]})"
    return str(value)

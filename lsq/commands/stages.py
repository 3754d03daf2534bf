"""Stages of a long job that is run again after an interruption: each finished one leaves a stamp.

A stamp is a JSON file that holds the stage's key: its options and the keys or digests of what it reads. A stage
whose stamp equals its key is skipped; one whose key has changed is done again from the beginning.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from lsq.files import write_text

STAMP = "stamp.json"


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_digest(key: dict) -> str:
    """SHA-256 of a key, in hexadecimal: what later stages put into theirs."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def read_stamp(folder: Path) -> dict | None:
    """The key that a stage left in its folder, or None."""
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_stamp(folder: Path, key: dict) -> None:
    """Mark the stage of this folder as done with this key."""
    write_json(folder / STAMP, key)


def run_stage(folder: Path, key: dict, work: Callable[[Path], None], say: Callable[[str], None]) -> str:
    """Fill `folder` by `work(folder)`, unless its stamp says that it was done with the same key.

    Returns:
        The key's digest.
    """
    if read_stamp(folder) == key:
        say(f"{folder.name}: already done")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        work(folder)
        write_stamp(folder, key)
    return key_digest(key)


def differences(before: dict, now: dict) -> list[str]:
    """What changed between two keys, one readable entry each: "updates: 100 before, 200 now"."""
    names = sorted(before.keys() | now.keys())
    return [
        f"{name}: {before.get(name)} before, {now.get(name)} now" for name in names if before.get(name) != now.get(name)
    ]

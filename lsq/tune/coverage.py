"""Which products a run asked for, and which of them were tuned: for the log, and for `lsq tune --missing`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsq.gemm import json_file
from lsq.gemm.configuration_file import product_key, texts
from lsq.gemm.device import FORMAT, check_format
from lsq.gemm.json_file import check_choice, check_number, check_text, check_whole, shown
from lsq.gemm.lookup import Table
from lsq.gemm.product_key import ProductKey

_REMEDY = "correct or delete the file, or have a run write it again"
_LARGEST_COUNT = 2**62
_LARGEST_SECONDS = 1e12
SHOWN = 10
"""Missed products that the text lists."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One product.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    key: ProductKey
    """As it stands in files: with its number of tokens rounded."""
    calls: int
    seconds: float
    """How long all calls took; 0 where that was not measured."""
    served: ProductKey | None
    """The entry by which it ran: its own, or that of the nearest batch size; None: it ran as untuned."""

    def __post_init__(self) -> None:
        check_whole("calls", self.calls, 0, _LARGEST_COUNT)
        check_number("seconds", self.seconds, _LARGEST_SECONDS)

    @property
    def hit(self) -> bool:
        """Whether there is an entry for this very product."""
        return self.served == self.key

    @property
    def operations(self) -> int:
        """Multiplications and additions of all calls."""
        return self.calls * self.key.operations


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The products of a run, those that take longest first: by time where it was measured, else by operations.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    format: int = FORMAT
    kind: str
    """"cpu" or "cuda"."""
    device: str
    files: tuple[str, ...]
    """The files that the entries came from."""
    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        check_format(self.format)
        check_choice("kind", self.kind, ("cpu", "cuda"))
        check_text("device", self.device)
        for place, name in enumerate(self.files):
            if not isinstance(name, str):
                raise ValueError(f"files[{place}] is {shown(name)}; it must be a path")
        order = sorted(self.lines, key=lambda line: (-line.seconds, -line.operations, str(line.key)))
        object.__setattr__(self, "lines", tuple(order))

    @property
    def missed(self) -> list[Line]:
        """The products that have no entry of their own."""
        return [line for line in self.lines if not line.hit]

    def shares(self, measure: str) -> tuple[float, float] | None:
        """(share with an entry of their own, share that ran by the nearest batch size's); None if there were none.

        Args:
            measure: "calls", "operations" or "seconds".
        """
        total = sum(getattr(line, measure) for line in self.lines)
        if not total:
            return None
        own = sum(getattr(line, measure) for line in self.lines if line.hit)
        served = sum(getattr(line, measure) for line in self.lines if line.served is not None)
        return own / total, (served - own) / total

    def text(self) -> str:
        """For logs: the shares, and the missed products that matter most."""
        calls = sum(line.calls for line in self.lines)
        if not calls:
            return f"tuned products on {self.device}: none was asked for"
        lines = [f"tuned products on {self.device}: {calls} calls of {len(self.lines)} products"]
        for measure, name in (("calls", "calls"), ("operations", "operations"), ("seconds", "time")):
            shares = self.shares(measure)
            if shares is not None:
                own, near = shares
                rest = 1 - own - near
                lines.append(f"  {name}: {own:.1%} tuned, {near:.1%} as the nearest batch size, {rest:.1%} not")
        lines += [f"  from {path}" for path in self.files] or ["  there is no file for this device"]
        missed = self.missed
        for line in missed[:SHOWN]:
            time = f", {line.seconds:.3f} s" if line.seconds else ""
            served = f"ran as {line.served.tokens} tokens" if line.served else "ran untuned"
            lines.append(f"  missed {line.key}: {line.calls} calls{time}; {served}")
        if len(missed) > SHOWN:
            lines.append(f"  and {len(missed) - SHOWN} more")
        return "\n".join(lines)


def of(table: Table) -> Coverage:
    """What was asked of a table of tuned products so far."""
    lines = [
        Line(key=use.key, calls=use.calls, seconds=use.seconds, served=None if use.entry is None else use.entry.key)
        for use in table.uses()
    ]
    files = tuple(str(each.path) for each in table.used)
    return Coverage(kind=table.here.kind, device=table.here.device, files=files, lines=tuple(lines))


def write(path: Path, coverage: Coverage) -> None:
    """Write a report as JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    head = {name: value for name, value in vars(coverage).items() if name != "lines"}
    json_file.write(path, head, "lines", [_fields(line) for line in coverage.lines])


def read(path: Path) -> Coverage:
    """Read what `write` wrote.

    Raises:
        ValueError: it is no such file; the message says where, what stands there, and what is allowed.
        OSError: it cannot be read.
    """
    return json_file.read(path, _coverage, _REMEDY)


def _coverage(content: Any) -> Coverage:
    if isinstance(content, dict):
        check_format(content.get("format"))
    return json_file.record(
        Coverage, content, "", files=texts, lines=lambda lines, place: json_file.sequence(lines, place, _line)
    )


def _line(value: Any, place: str) -> Line:
    return json_file.record(Line, value, place, key=product_key, served=_served)


def _served(value: Any, place: str) -> ProductKey | None:
    return None if value is None else product_key(value, place)


def _fields(line: Line) -> dict[str, Any]:
    served = None if line.served is None else line.served.fields()
    return {"key": line.key.fields(), "calls": line.calls, "seconds": line.seconds, "served": served}

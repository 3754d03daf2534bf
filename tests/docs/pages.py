"""The pages of the documentation, and the code blocks on them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/*.md", "recipes/**/README.md", "benchmarks/README.md")
KINDS = ("python", "bash", "output", "text")
"""python and bash are run; output is what the block before it prints; text is a formula, a diagram
or an extract."""

_LINK = re.compile(r"\]\(([^)\s]*)\)")
_FENCE = re.compile(r"( {0,3})(```+)(.*)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block.

    Attributes:
        page: the file that it stands in.
        line: number of its first line in that file, from 1.
        kind: the word after the fence; "" where there is none, "indented" for a block without a
            fence.
        text: its content.
    """

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """Every page, relative to the repository's root."""
    return sorted({path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern)})


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in their order.

    Raises:
        ValueError: a fence that is not closed.
    """
    lines = page.read_text(encoding="utf-8").split("\n")
    found = []
    number = 0
    while number < len(lines):
        opening = _FENCE.fullmatch(lines[number])
        number += 1
        if opening:
            indent, fence, kind = opening.groups()
            start = number
            while number < len(lines) and lines[number].strip() != fence:
                number += 1
            if number == len(lines):
                raise ValueError(f"{page}:{start}: this fence is not closed")
            content = [line.removeprefix(indent) for line in lines[start:number]]
            found.append(
                Block(page=page, line=start + 1, kind=kind.strip(), text="\n".join(content) + "\n")
            )
            number += 1
        elif lines[number - 1].startswith("    ") and (
            number == 1 or not lines[number - 2].strip()
        ):
            found.append(
                Block(page=page, line=number, kind="indented", text=lines[number - 1] + "\n")
            )
    return found


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    fenced = {number for block in blocks(page) for number in _lines_of(block)}
    return {
        re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1)
        if line.startswith("#") and number not in fenced
    }


def broken_links(page: Path) -> list[str]:
    """The links of a page to files and headings of the repository that are not there."""
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


def _lines_of(block: Block) -> range:
    return range(block.line, block.line + block.text.count("\n"))

"""`lsq translate`: text in, translations out."""

import codecs
import contextlib
import io
import itertools
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from lsq import files
from lsq.commands import interruption, logs
from lsq.commands.options import Count, File, check_writable, command_parser, is_part_of
from lsq.commands.translator import ModelOptions, add_search, search_options, translator_of
from lsq.files.lock import locked_file
from lsq.serving.search_options import SearchOptions
from lsq.serving.translator import LONG_LINES, RefusedLine, TextTranslator, Translation
from lsq.text.corpus import check_file

logger = logging.getLogger(__name__)

STANDARD_INPUT = Path("-")
LONGEST = 2**26
"""Most bytes of a line: endless input such as /dev/zero would fill the memory."""
DEVICES = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Line:
    source: str
    """File and line number, for messages."""
    number: int
    text: str
    prefix: str


class Options(ModelOptions):
    """Translate text: UTF-8, one sentence a line. Line i of the output is the translation of line i
    of the input. At a terminal, each line is translated as it is typed. With --nbest above 1, each
    output line begins with the number of its input line, and a tab."""

    output: File | None = None
    """written whole or not at all (default: standard output)"""
    prefix: File | None = None
    """its line i is the beginning of translation i"""
    scores: bool = False
    """begin each line with its score and a tab"""
    buffer: Count = 4096
    """lines that are read before they are translated, sorted by length"""
    quiet: bool = False
    """no progress bar"""


def parser() -> ArgumentParser:
    made = command_parser("translate", Options)
    text = "text, one after the other (default: -, standard input)"
    made.add_argument("files", type=Path, nargs="*", metavar="FILE", help=text)
    add_search(made)
    return made


def run(arguments: list[str]) -> int:
    """Translate; Ctrl-C keeps what standard output has, and leaves an --output as it was."""
    given = parser().parse_args(arguments)
    logs.to_standard_error()
    logs.quieten()
    given.files = given.files or [STANDARD_INPUT]
    check_files(given)
    translator = translator_of(given)
    options = search_options(given, translator.options)
    with contextlib.ExitStack() as opened:
        texts = translated(lines_of(given, opened), translator, options, given)
        if given.output is not None:
            with interruption.raised(), locked_file(given.output, "choose another --output"):
                files.write(given.output, lambda file: file.writelines(map(str.encode, texts)))
            return 0
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # in every locale
        for text in texts:
            print(text, end="", flush=True)
    return 0


def check_files(given: Namespace) -> None:
    """Check that inputs exist, and that --output is a writable plain file and none of them."""
    if given.prefix == STANDARD_INPUT and STANDARD_INPUT in given.files:
        raise ValueError(
            "the text and --prefix cannot both be standard input; name a file for one of them"
        )
    inputs = [path for path in (*given.files, given.prefix) if path not in (None, STANDARD_INPUT)]
    for path in inputs:
        check_file(path)
    output = given.output
    if output is None:
        return
    check_writable(output)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file")
    if output.absolute().parent == DEVICES or output.exists() and not output.is_file():
        raise ValueError(
            f"--output {output} is a device or a pipe, and would be replaced; use > instead"
        )
    read = [*inputs, *filter(None, (given.model, given.data, given.sentencepiece_model))]
    if output.exists() and is_part_of(output, read):
        raise ValueError(f"--output {output} is what is read, or part of it; choose another")


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file as they come; lines end at a line feed only. ValueError names
    a line that is not UTF-8, holds a NUL byte or is longer than LONGEST."""
    number = 0
    while raw := file.readline(LONGEST + 1):
        number += 1
        if len(raw) > LONGEST:
            raise ValueError(
                f"{name}, line {number} has more than {LONGEST} bytes; it must hold one sentence a"
                " line"
            )
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if b"\0" in raw:
            raise ValueError(
                f"{name}, line {number}: a NUL byte is no text; remove it, e.g. with tr -d '\\000'"
            )
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: byte 0x{raw[error.start]:02x} is not valid UTF-8;"
                " convert the file first, e.g. with iconv"
            ) from None


def lines_of(given: Namespace, opened: contextlib.ExitStack) -> Iterator[Line]:
    """Yield the lines of all files; ValueError if there are more or fewer prefixes than lines."""

    def lines(path: Path) -> Iterator[tuple[str, str]]:
        if path == STANDARD_INPUT:
            name, file = "standard input", sys.stdin.buffer
        else:
            name, file = str(path), opened.enter_context(path.open("rb"))
        for number, text in enumerate(read_lines(file, name), 1):
            yield f"{name}, line {number}", text

    texts = itertools.chain.from_iterable(map(lines, given.files))
    prefixes = itertools.repeat((None, "")) if given.prefix is None else lines(given.prefix)
    number = 0
    pairs = zip(texts, itertools.chain(prefixes, [None]), strict=False)
    for number, ((source, text), prefix) in enumerate(pairs, 1):
        if prefix is None:
            raise ValueError(
                f"{given.prefix} has {number - 1} lines, and there are more to translate ({source})"
            )
        yield Line(source=source, number=number, text=text, prefix=prefix[1])
    if not number:
        logger.warning("standard input is empty: there is nothing to translate")
    if given.prefix is not None and next(prefixes, None) is not None:
        raise ValueError(
            f"{given.prefix} has more lines than the {number} that are to be translated"
        )


def translated(
    lines: Iterable[Line], translator: TextTranslator, options: SearchOptions, given: Namespace
) -> Iterator[str]:
    """Yield lines of the output as soon as they are translated; ValueError names a refused line."""
    typed = STANDARD_INPUT in given.files and sys.stdin.isatty()
    if typed:
        print("one sentence a line; Ctrl-D ends", file=sys.stderr)
    lines, too_long, first = iter(lines), 0, None
    with tqdm(unit=" sentences", disable=typed or given.quiet or None) as bar:
        while chunk := list(itertools.islice(lines, 1 if typed else given.buffer)):
            try:
                results = translator.translate(
                    [line.text for line in chunk],
                    options,
                    prefixes=[line.prefix for line in chunk],
                    progress=bar.update,
                )
            except RefusedLine as refused:
                message = f"{chunk[refused.line].source}: {refused.reason}"
                if not typed:
                    raise ValueError(message) from None
                print(message, file=sys.stderr)
                continue
            for line, translations in zip(chunk, results, strict=True):
                if translations[0].too_long:
                    too_long, first = too_long + 1, first or line.source
                yield from (
                    shown(line, translation, options, given.scores) for translation in translations
                )
    if too_long:
        logger.warning(
            "lines of more than %d subwords are too long for the model: %d such lines %s (see"
            " --long-lines), the first of them %s",
            translator.model.longest_source - 1,
            too_long,
            LONG_LINES[translator.long_lines],
            first,
        )


def shown(line: Line, translation: Translation, options: SearchOptions, scores: bool) -> str:
    columns = [str(line.number)] if options.nbest > 1 else []
    columns += [f"{translation.score:.6f}"] if scores else []
    return "\t".join([*columns, translation.text]) + "\n"

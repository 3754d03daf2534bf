"""Command lines: declared options, types of values, and messages of mistakes."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Annotated

import pytest

from lsq.commands.options import (
    Count,
    File,
    HelpFormatter,
    check_writable,
    command_parser,
    count,
    is_given,
    near,
    one_line_errors,
    positive,
)


class Group(Namespace):
    """what to read"""

    files: list[File] = []
    """some files"""
    most: Count = 3
    """of 100 %"""


class Options(Group):
    """Do a thing."""

    model: Path
    """what to use"""
    kind: Annotated[str, ("a", "b")] | None = None
    """which one"""
    quick_way: bool = False
    """no detours"""
    most = 5


def test_options_are_declared_by_a_class(capsys):
    parser = command_parser("thing", Options)
    given = parser.parse_args("--model m --files a --files b c --quick-way".split())
    assert given.model == Path("m") and given.files == [Path("a"), Path("b"), Path("c")]
    assert (given.kind, given.quick_way, given.most, Options.files) == (None, True, 5, [])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    for part in ("usage: lsq thing", "Do a thing.", "what to read:\n  --files FILE [FILE ...]"):
        assert part in shown
    assert "--most N              of 100 % (default: 5)" in shown and "--kind {a,b}" in shown


def error_of(given, capsys, **options) -> str:
    parser = ArgumentParser(prog="lsq thing", allow_abbrev=False)
    one_line_errors(parser)
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(given)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("lsq thing: error: ")
    assert printed.err.endswith(" (see lsq thing --help)\n") and printed.err.count("\n") == 1
    return printed.err.removeprefix("lsq thing: error: ").removesuffix(" (see lsq thing --help)\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--scr", "a", "--tgt", "b"], "unrecognized arguments: --scr; did you mean --src?"),
        (
            ["--scr=a", "--zzzzz", "b", "--", "--other"],
            "unrecognized arguments: --scr --zzzzz; did you mean --src?",
        ),
        (["--tgt", "--a b"], "the following arguments are required: --src"),
        (["--src", "a", "--tgt", "b", "c"], "unrecognized arguments: c"),
    ],
)
def test_unknown_options_are_named_before_those_that_are_missing(given, expected, capsys):
    assert error_of(given, capsys, src={"required": True}, tgt={"required": True}) == expected


def test_near():
    known = "transformer_lm transformer_align lsq_transformer lsq_transformer_lm --src --lr --eos"
    known = known.split()
    assert near("transformer_lsq", known) == ["lsq_transformer"]
    assert near("LSQ-Transformer", known) == ["lsq_transformer"]
    assert near("lsq_transfomer", known)[0] == "lsq_transformer"
    assert near("--scr", known) == ["--src"]
    assert near("zzz", known) == []


def test_few_choices_are_listed_and_long_messages_shortened(capsys):
    few = {"choices": ["a", "b"]}
    text = error_of(["--arch", "c"], capsys, arch=few)
    assert "invalid choice: 'c' (choose from 'a', 'b')" in text
    text = error_of(["--arch", "x" * 5000], capsys, arch=few)
    assert text.startswith("argument --arch: invalid choice: 'xxx") and len(text) < 1200
    assert text.endswith("x' (choose from 'a', 'b')")
    many = {"choices": [*(f"model_{number}" for number in range(30)), "lsq_transformer"]}
    text = error_of(["--arch", "lsq_tranformer"], capsys, arch=many)
    assert "invalid choice: 'lsq_tranformer'; did you mean lsq_transformer?" in text
    assert "model_1" not in text
    assert error_of(["--arch", "zzz"], capsys, arch=many).endswith("invalid choice: 'zzz'")
    unnamed = {"type": lambda text: float(text)}
    assert error_of(["--lr", "x"], capsys, lr=unnamed) == "argument --lr: invalid value: 'x'"


def test_numbers_and_words():
    assert positive("17") == 17 and count("4194304") == 2**22
    with pytest.raises(ArgumentTypeError, match="4194305 is too large; at most 4194304"):
        count("4194305")
    for text in ("0", "-1", "1.5", "", "many", "٤", "1_0", " 1", "1" * 19):
        with pytest.raises(ArgumentTypeError, match="is not a whole number above 0"):
            positive(text)
    assert is_given("--lr", ["--lr", "1"]) and is_given("--lr", ["a", "--lr=1"])
    assert not is_given("--lr", ["--lrs", "lr"])


def test_an_output_without_its_folder(tmp_path):
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "none" / "new", makes_folders=True)
    message = r"^--plot .*/none/new: there is no folder .*/none; make it first$"
    with pytest.raises(ValueError, match=message):
        check_writable(tmp_path / "none" / "new", "--plot")


@pytest.mark.parametrize(
    "words",
    [
        "plan FILE.csv --output OUT/a.csv",
        "plan FILE.csv --plot OUT/a.png",
        "formats --checkpoint FILE --output OUT/a",
        "sensitivity --model FILE --output OUT/a/b",
        "tune --shapes SHAPES --output OUT/a/b.json",
        "translate --model FILE --output OUT/a FILE",
        "export FILE --to lsq --output OUT/a",
        "convert-checkpoint FILE --bits 4 --output OUT/a",
        "train-text --src FILE --tgt FILE --output OUT/a/b",
        "compare --src FILE --tgt FILE --output OUT",
        "numbers --output OUT/a",
        "train DATA --lr 1 --max-tokens 9 --save-dir OUT/a/b",
        "generate DATA --path FILE --results-path OUT/a",
    ],
)
def test_a_folder_that_may_not_be_written_is_told_before_the_work(
    words, tmp_path, monkeypatch, lsq
):
    """No file that is read is what it should be: any work would fail for another reason."""
    monkeypatch.chdir(tmp_path)
    for folder in ("OUT", "DATA"):
        (tmp_path / folder).mkdir()
    for name in ("FILE", "DATA/dict.a.txt", "DATA/dict.b.txt"):
        (tmp_path / name).write_text("word\n")
    (tmp_path / "FILE.csv").write_text("id,lower,upper,size\na,0,1,2\n")
    (tmp_path / "SHAPES").write_text("op,m,n,k\n")
    access = "lsq.commands.options.os.access"
    monkeypatch.setattr(access, lambda path, mode: path != tmp_path / "OUT")
    before = sorted(tmp_path.rglob("*"))
    option, _, output = words.rpartition(" OUT")
    option = option.split()[-1]
    output = f"OUT{output.split()[0] if output else ''}"
    reason = f"this user may not write into {tmp_path / 'OUT'}; choose another {option}"
    said = f"lsq {words.split()[0]}: error: {option} {output}: {reason}\n"
    assert lsq(*words.split()) == (2, "", said)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_shows_defaults_that_say_something():
    parser = ArgumentParser(formatter_class=HelpFormatter)
    parser.add_argument("--number", default=0, help="a number")
    parser.add_argument("--file", help="a file")
    parser.add_argument("--quiet", action="store_true", help="no bars")
    parser.add_argument("--names", nargs="+", default=["a", "b"], help="names")
    parser.add_argument("--more", nargs="+", default=[], help="more")
    text = parser.format_help()
    assert "names (default: a b)" in text and "[]" not in text
    assert "a number (default: 0)" in text and "None" not in text and "False" not in text

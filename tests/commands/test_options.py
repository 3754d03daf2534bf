from argparse import ArgumentParser, ArgumentTypeError

import pytest

from lsq.commands import cli
from lsq.commands.options import (
    HelpFormatter,
    check_writable,
    count,
    is_given,
    near,
    one_line_errors,
    positive,
)


def error_of(choices, given, capsys) -> str:
    parser = ArgumentParser(prog="lsq thing")
    one_line_errors(parser)
    parser.add_argument("--arch", choices=choices)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(given)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_unknown_option(capsys):
    assert error_of(["a"], ["--foo"], capsys) == (
        "lsq thing: error: unrecognized arguments: --foo (see lsq thing --help)\n"
    )


def test_unknown_options_are_named_before_those_that_are_missing(capsys):
    parser = ArgumentParser(prog="lsq thing", allow_abbrev=False)
    one_line_errors(parser)
    parser.add_argument("--src", required=True)
    parser.add_argument("--tgt", required=True)
    for given, expected in (
        (["--scr", "a", "--tgt", "b"], "unrecognized arguments: --scr; did you mean --src?"),
        (
            ["--scr=a", "--zzzzz", "b", "--", "--other"],
            "unrecognized arguments: --scr --zzzzz; did you mean --src?",
        ),
        (["--tgt", "--a b"], "the following arguments are required: --src"),
        (["--src", "a", "--tgt", "b", "c"], "unrecognized arguments: c"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(given)
        assert capsys.readouterr().err == f"lsq thing: error: {expected} (see lsq thing --help)\n"


def test_near():
    known = [
        "transformer_lm",
        "transformer_align",
        "lsq_transformer",
        "lsq_transformer_lm",
        "--src",
        "--lr",
        "--eos",
    ]
    assert near("transformer_lsq", known) == ["lsq_transformer"]
    assert near("LSQ-Transformer", known) == ["lsq_transformer"]
    assert near("lsq_transfomer", known)[0] == "lsq_transformer"
    assert near("--scr", known) == ["--src"]
    assert near("zzz", known) == []


def test_is_given():
    assert is_given("--lr", ["--lr", "1"]) and is_given("--lr", ["a", "--lr=1"])
    assert not is_given("--lr", ["--lrs", "lr"])


def test_few_choices_are_listed(capsys):
    assert "invalid choice: 'c' (choose from 'a', 'b')" in error_of(
        ["a", "b"], ["--arch", "c"], capsys
    )


def test_many_choices_are_not(capsys):
    choices = [f"model_{number}" for number in range(30)] + ["lsq_transformer"]
    text = error_of(choices, ["--arch", "lsq_tranformer"], capsys)
    assert "invalid choice: 'lsq_tranformer'; did you mean lsq_transformer?" in text
    assert "model_1" not in text
    assert "invalid choice: 'zzz' (see" in error_of(choices, ["--arch", "zzz"], capsys)


def test_long_messages_keep_their_beginning_and_end(capsys):
    text = error_of(["a", "b"], ["--arch", "x" * 5000], capsys)
    assert (
        text.startswith("lsq thing: error: argument --arch: invalid choice: 'xxx")
        and len(text) < 1200
    )
    assert text.endswith("x' (choose from 'a', 'b') (see lsq thing --help)\n")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many", "٤", "1_0", " 1", "1" * 19])
def test_positive_refuses(text):
    with pytest.raises(ArgumentTypeError, match="is not a whole number above 0"):
        positive(text)


def test_positive():
    assert positive("17") == 17


def test_count():
    assert count("4194304") == 2**22
    with pytest.raises(ArgumentTypeError, match="4194305 is too large; at most 4194304"):
        count("4194305")


def test_an_output_without_its_folder(tmp_path):
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "none" / "new", makes_folders=True)
    with pytest.raises(
        ValueError, match=r"^--plot .*/none/new: there is no folder .*/none; make it first$"
    ):
        check_writable(tmp_path / "none" / "new", "--plot")


@pytest.mark.parametrize(
    "words",
    [
        "plan FILE.csv --output OUT/a.csv",
        "plan FILE.csv --plot OUT/a.png",
        "formats --checkpoint FILE --output OUT/a",
        "sensitivity --model FILE --output OUT/a/b",
        "tune --shapes SHAPES --output OUT/a/b.json",
        "configs export OUT/a",
        "tune --shapes SHAPES --output a.json --plot OUT/a.png",
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
    words, tmp_path, monkeypatch, capsys
):
    """No file that is read is what it should be: any work would fail for another reason."""
    monkeypatch.chdir(tmp_path)
    for folder in ("OUT", "DATA"):
        (tmp_path / folder).mkdir()
    for name in ("FILE", "DATA/dict.a.txt", "DATA/dict.b.txt"):
        (tmp_path / name).write_text("word\n")
    (tmp_path / "FILE.csv").write_text("id,lower,upper,size\na,0,1,2\n")
    (tmp_path / "SHAPES").write_text("op,m,n,k\n")
    monkeypatch.setattr(
        "lsq.commands.options.os.access", lambda path, mode: path != tmp_path / "OUT"
    )
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(words.split()) == 2
    option, _, output = words.rpartition(" OUT")
    option = option.split()[-1].replace("export", "PATH")
    output = f"OUT{output.split()[0] if output else ''}"
    printed = capsys.readouterr()
    reason = f"this user may not write into {tmp_path / 'OUT'}; choose another {option}"
    assert (
        printed.err == f"lsq {words.split()[0]}: error: {option} {output}: {reason}\n"
        and not printed.out
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_types_without_a_name_are_not_named(capsys):
    parser = ArgumentParser(prog="lsq thing")
    one_line_errors(parser)
    parser.add_argument("--lr", type=lambda text: float(text))
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr", "x"])
    assert (
        capsys.readouterr().err
        == "lsq thing: error: argument --lr: invalid value: 'x' (see lsq thing --help)\n"
    )


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

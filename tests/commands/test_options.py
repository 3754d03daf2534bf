from argparse import ArgumentParser, ArgumentTypeError

import pytest

from lsq.commands.options import one_line_errors, positive


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


def test_few_choices_are_listed(capsys):
    assert "invalid choice: 'c' (choose from 'a', 'b')" in error_of(["a", "b"], ["--arch", "c"], capsys)


def test_many_choices_are_not(capsys):
    choices = [f"model_{number}" for number in range(30)] + ["lsq_transformer"]
    text = error_of(choices, ["--arch", "lsq_tranformer"], capsys)
    assert "invalid choice: 'lsq_tranformer'; did you mean lsq_transformer?" in text
    assert "model_1" not in text
    assert "invalid choice: 'zzz' (see" in error_of(choices, ["--arch", "zzz"], capsys)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "many"])
def test_positive_refuses(text):
    with pytest.raises(ArgumentTypeError, match="is not a whole number above 0"):
        positive(text)


def test_positive():
    assert positive("17") == 17

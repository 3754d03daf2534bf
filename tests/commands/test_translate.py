"""`lsq translate`: text in, translations out, and what is refused."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lsq.commands import translate
from lsq.commands.translate import read_lines
from lsq.files.lock import Busy, locked_file
from lsq.text.corpus import read_items
from tests.commands.conftest import files_in
from tests.sampling import first

TEXT = "red cat five\n\n \ntwo dog\n"


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def lsq_translate(output, capsysbinary, monkeypatch):
    """lsq_translate(*options) runs the command on a small model; returns its lines."""

    def lsq_translate(*options: object, given: bytes = b"") -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert translate.run(["--model", str(output), "--beam", "2", *map(str, options)]) == 0
        return capsysbinary.readouterr().out.decode().splitlines()

    return lsq_translate


def test_standard_input(lsq_translate, output):
    sources = "".join(f"{line}\n" for line in read_items(output / "data" / "test.src"))
    hypotheses = read_items(output / "int8" / "translation" / "hypotheses.txt")
    options = ("--threads", 1, "--batch-tokens", 30, "--buffer", 2)
    assert lsq_translate(given=sources.encode()) == hypotheses
    assert lsq_translate(*options, given=sources.encode()) == hypotheses
    assert lsq_translate() == []


def test_several_files_in_their_order(lsq_translate, text, tmp_path):
    found = lsq_translate(text)
    assert len(found) == 4 and found[1] == found[2] == "" and found[0] and found[3]
    other = tmp_path / "other.txt"
    other.write_text("two dog")
    assert lsq_translate(other, "-", text, given=TEXT.encode()) == [found[3], *found, *found]


def test_scores_and_several_translations(lsq_translate, text):
    plain = lsq_translate(text)
    scored = [line.split("\t") for line in lsq_translate(text, "--scores")]
    assert [text for _, text in scored] == plain
    assert float(scored[0][0]) < 0 and scored[1][0] == "0.000000"
    found = [line.split("\t") for line in lsq_translate(text, "--scores", "--nbest", 2)]
    assert [number for number, *_ in found] == ["1", "1", "2", "3", "4", "4"]
    assert found[0][1:] == scored[0] and float(found[1][1]) <= float(found[0][1])
    assert len(lsq_translate(text, "--nbest", 2)[0].split("\t")) == 2


def test_options_reach_the_search(lsq_translate, text):
    plain = lsq_translate(text, "--scores")
    assert lsq_translate(text, "--scores", "--unnormalized") != plain
    assert lsq_translate(text, "--scores", "--length-penalty", 2) != plain
    assert all(len(line.split()) <= 3 for line in lsq_translate(text, "--max-len-b", 3))
    sampling = ("--sampling", "--temperature", 20, "--seed")
    drawn = [lsq_translate(text, *sampling, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for options, message in (
        (["--nbest", "3"], "nbest is 3 and beam 2"),
        (["--sampling-topk", "3"], "they need sampling"),
        (["--temperature", "0"], "temperature is 0.0"),
        (["--length-penalty", "1e300"], r"length_penalty is 1e\+300; it must be from -10 to 10"),
        (["--threads", "100000"], "--threads is 100000, and this machine has [0-9]+ cores"),
    ):
        with pytest.raises(ValueError, match=message):
            lsq_translate(text, *options)


def test_prefixes(lsq_translate, text, tmp_path):
    prefixes = tmp_path / "prefixes.txt"
    prefixes.write_text("GREEN\n\n\nBLUE CAT\n")
    found = lsq_translate(text, "--prefix", prefixes)
    assert found[0].startswith("GREEN") and found[3].startswith("BLUE CAT")
    assert found[1] == found[2] == ""
    for content, message in (
        ("GREEN\n", rf"{prefixes} has 1 lines, and there are more to translate \({text}, line 2\)"),
        ("\n" * 5, f"{prefixes} has more lines than the 4 that are to be translated"),
    ):
        prefixes.write_text(content)
        with pytest.raises(ValueError, match=message):
            lsq_translate(text, "--prefix", prefixes)


def test_output_is_written_whole_or_not_at_all(lsq_translate, text, tmp_path):
    written = tmp_path / "out.txt"
    busy = "is writing into .*out.txt; wait for it, or choose"
    with locked_file(written, ""), pytest.raises(Busy, match=busy):
        lsq_translate(text, "--output", written)
    assert list(tmp_path.iterdir()) == [text]
    assert lsq_translate(text, "--output", written) == []
    found = written.read_text()
    assert found.splitlines() == lsq_translate(text)
    text.write_bytes(TEXT.encode() + b"\xff\n")
    with pytest.raises(ValueError, match=f"{text}, line 5: byte 0xff is not valid UTF-8"):
        lsq_translate(text, "--output", written, "--buffer", 1)
    assert written.read_text() == found and sorted(tmp_path.iterdir()) == [text, written]


def test_output_is_no_part_of_the_model(lsq_translate, output, text, tmp_path):
    before, subwords = files_in(output), output / "vocabulary/sentencepiece.model"
    checkpoint, words = output / "int8/model/checkpoint_best.pt", output / "data/dict.src.txt"
    given = ("--model", checkpoint, "--data", output / "data", "--sentencepiece-model", subwords)
    (tmp_path / "link").symlink_to(output / "data")
    for options, written in (
        *(((), path) for path in (checkpoint, subwords, words)),
        *((given, path) for path in (subwords, tmp_path / "link" / "dict.src.txt")),
    ):
        with pytest.raises(ValueError, match="is what is read, or part of it; choose another"):
            lsq_translate(text, *options, "--output", written)
    assert files_in(output) == before


def test_long_lines(lsq_translate, text, caplog):
    line = "red cat. " * 30
    text.write_text(f"red cat.\n{line}\n{'red cat ' * 60}\nred cat.\n")
    short, *_ = lsq_translate(given=b"red cat.")
    cut = " ".join([short] * 30).strip()
    for options, done, expected in (
        ((), "are cut and translated in parts", cut),
        (("--long-lines", "skip"), "are left empty", ""),
    ):
        caplog.clear()
        found = lsq_translate(text, "--buffer", 1, *options)
        assert found[:2] == [short, expected] and len(found) == 4 and found[3] == short
        (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert said == (
            f"lines of more than 40 subwords are too long for the model: 2 such lines {done} (see"
            f" --long-lines), the first of them {text}, line 2"
        )
    said = "in.txt, line 2: it has [0-9]+ subwords, and the model takes 40 at most"
    with pytest.raises(ValueError, match=said):
        lsq_translate(text, "--long-lines", "refuse")


def test_empty_files_are_called_empty(lsq_translate, text, tmp_path, caplog):
    empty = tmp_path / "empty.txt"
    empty.touch()
    for given in ([empty], [text, empty], ["--prefix", empty, text]):
        with pytest.raises(ValueError, match="empty.txt is empty; it must hold one sentence a"):
            lsq_translate(*given)
    for option in ("--model", "--sentencepiece-model"):
        with pytest.raises(ValueError, match="empty.txt is empty; it was not written whole"):
            lsq_translate(text, "--data", tmp_path, option, empty)
    assert lsq_translate() == []
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["standard input is empty: there is nothing to translate"]


def test_files_are_looked_at_before_the_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(translate, "translator_of", None)
    with pytest.raises(FileNotFoundError, match="there is no file .*missing"):
        translate.run(["--model", "m", str(tmp_path / "missing")])
    with pytest.raises(ValueError, match="is not a file"):
        translate.run(["--model", "m", "--prefix", str(tmp_path)])
    text = tmp_path / "in.txt"
    text.write_text("red\n")
    os.mkfifo(tmp_path / "pipe")
    for written, message in (
        (tmp_path / "missing" / "out", "there is no folder .*missing"),
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "pipe", "pipe is a device or a pipe"),
        ("/dev/null", "/dev/null is a device or a pipe"),
        ("/dev/stdout", "/dev/stdout is a device or a pipe"),
        (tmp_path / "." / "in.txt", "is what is read, or part of it; choose another"),
    ):
        with pytest.raises(ValueError, match=message):
            translate.run(["--model", "m", str(text), "--output", str(written)])
    for files in ([], ["-"]):
        with pytest.raises(ValueError, match="--prefix cannot both be standard input"):
            translate.run(["--model", "m", "--prefix", "-", *files])


def start(output: Path, *options: str, **streams) -> subprocess.Popen:
    command = f"{sys.executable} -m lsq.commands.cli translate --model {output} --beam 1".split()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment["OMP_NUM_THREADS"] = "1"
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([*command, *options], env=environment, **streams)


@pytest.mark.thorough
def test_whoever_reads_may_go(output):
    found = start(output, "--buffer", "1", stdout=subprocess.PIPE)
    found.stdin.write(b"red\n")
    found.stdin.flush()
    assert found.stdout.readline()
    found.stdout.close()
    _, errors = found.communicate(b"red\n" * 5)
    assert found.returncode == 128 + signal.SIGPIPE and errors == b""


@pytest.mark.parametrize(
    ("sent", "name"),
    first(
        [
            (signal.SIGINT, b"Ctrl-C (SIGINT)"),
            (signal.SIGTERM, b"SIGTERM"),
            (signal.SIGHUP, b"SIGHUP"),
        ],
        0,
        1,
    ),
)
def test_signals_leave_nothing_half_written(output, tmp_path, sent, name):
    written = tmp_path / "out.txt"
    found = start(output, "--output", str(written), "--buffer", "1")
    found.stdin.write(b"red\n")
    found.stdin.flush()
    while not list(tmp_path.iterdir()):
        time.sleep(0.05)
    found.send_signal(sent)
    _, errors = found.communicate()
    assert found.returncode == 128 + sent and errors == b"lsq translate: stopped by " + name + b"\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_line_at_a_time_at_a_terminal(output):
    ours, theirs = pty.openpty()
    found = start(output, "--long-lines", "refuse", stdin=theirs, stdout=subprocess.PIPE)
    assert found.stderr.readline() == b"one sentence a line; Ctrl-D ends\n"
    os.write(ours, b"red cat\n")
    first = found.stdout.readline()
    os.write(ours, b"red cat " * 20 + b"\n")
    assert found.stderr.readline().startswith(b"standard input, line 2: it has ")
    os.write(ours, b"red cat\n\x04")
    assert found.stdout.readline() == first and found.wait() == 0


def read(content: bytes) -> list[str]:
    return list(read_lines(io.BytesIO(content), "in.txt"))


def test_lines(monkeypatch):
    for content, lines in (
        ("a\r\n\u2028b\n\nc".encode(), ["a\r\n", "\u2028b\n", "\n", "c"]),
        (b"", []),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a\n", "\ufeffb"]),  # a byte-order mark is no text
    ):
        assert read(content) == lines
    convert = "is not valid UTF-8; convert the file first, e.g. with iconv"
    for content, message in (
        (b"a\nb\xffc\n", f"in.txt, line 2: byte 0xff {convert}"),
        (b"a\n\n\xe4\xbd", f"in.txt, line 3: byte 0xe4 {convert}"),
        (b"\xff\xfea\0\n", "in.txt, line 1: a NUL byte is no text; remove it"),
    ):
        with pytest.raises(ValueError, match=message):
            read(content)
    found = read_lines(io.BytesIO(b"a\n\xff"), "in.txt")
    assert next(found) == "a\n"  # what is before a mistake is read
    monkeypatch.setattr(translate, "LONGEST", 4)
    assert read(b"abc\nabcd") == ["abc\n", "abcd"]
    with pytest.raises(ValueError, match="in.txt, line 2 has more than 4 bytes"):
        read(b"abc\nabcde")

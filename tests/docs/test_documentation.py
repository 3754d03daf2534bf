"""Every code block of the documentation runs, from the top of its page to the bottom, with nothing
else."""

import multiprocessing
import re
import sys
import time
from pathlib import Path

import pytest

from tests.commands.conftest import write_pairs
from tests.configurations import quick_configurations  # noqa: F401
from tests.docs import commands
from tests.docs.pages import KINDS, ROOT, blocks, broken_links, pages
from tests.docs.reader import Reader, page_left_behind

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers

LONG = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks/README.md",
    "docs/architecture.md",
    "docs/distributed.md",
    "docs/fairseq.md",
    "docs/gpu.md",
    "docs/memory.md",
    "docs/numbers.md",
    "docs/serving.md",
    "docs/start.md",
    "recipes/text/README.md",
)
"""Pages whose commands take longest, a few seconds to half a minute."""

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture
def reader(tmp_path) -> Reader:
    """Somebody in an empty folder with a text of their own: train.en and train.de."""
    write_pairs(tmp_path, "train", 200, seed=1)
    return Reader(tmp_path, commands.PROGRAMS, commands.follow)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page), marks=pytest.mark.thorough if str(page) in LONG else ())
        for page in pages()
    ],
)
def test_page(page, reader):
    with page_left_behind(reader):
        for block in blocks(ROOT / page):
            reader.read(block)


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_block_says_what_it_is(page):
    unknown = [
        f"{page}:{block.line}: {block.kind!r}"
        for block in blocks(ROOT / page)
        if block.kind not in KINDS
    ]
    assert not unknown, f"fence these blocks with one of {', '.join(KINDS)}: {unknown}"


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_lead_somewhere_and_lines_are_short(page):
    assert not broken_links(ROOT / page)
    lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
    assert not [line for line in lines if len(line) > 100]


def test_the_documentation_is_short():
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages() if is_main(page)]
    assert len(texts) == 11
    assert sum(len(text.split()) for text in texts) <= 22_000


def is_main(page: Path) -> bool:
    """Whether a page is README.md or in docs."""
    return page.parent == Path("docs") or page == Path("README.md")


def test_every_picture_is_shown():
    texts = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages())
    assert not [one for one in (ROOT / "docs").glob("*.png") if f"]({one.name})" not in texts]


def test_code_names_pages_that_exist():
    named = {
        (path.relative_to(ROOT), page)
        for folder in ("lsq", "benchmarks", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert not [(str(path), page) for path, page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("rule", commands.RULES, ids=lambda rule: rule.words)
def test_every_rule_is_needed_and_says_why(rule):
    assert any(rule.words in block.text for page in pages() for block in blocks(ROOT / page)), (
        "no page has this"
    )
    assert (rule.runs and not rule.extra) != bool(rule.why), (
        "give a reason where a command does not run as printed"
    )
    assert not (rule.runs and rule.test), "it runs here"
    assert (ROOT / rule.test).exists()


def page_of(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_blocks_of_a_page(tmp_path):
    text = (
        "# Title\n\n```python\nx = 1\n\ny = 2\n```\n\n* item\n  continued\n\n    old"
        " style\n\n``` text\n    a\n```\n"
    )
    found = [(block.line, block.kind, block.text) for block in blocks(page_of(tmp_path, text))]
    assert found == [
        (4, "python", "x = 1\n\ny = 2\n"),
        (12, "indented", "    old style\n"),
        (15, "text", "    a\n"),
    ]
    with pytest.raises(ValueError, match=r"page.md:1: this fence is not closed"):
        blocks(page_of(tmp_path, "```python\nx = 1\n"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nprint(model)\n```", NameError),
        ("```python\nx = 1\n```\n```output\n1\n```", AssertionError),
        ("```python\nprint('a b')\n```\n```output\na ... c\n```", AssertionError),
        (
            "```bash\nlsq train-text --src train.en --tgt train.de --output o --no-such-option"
            " 1\n```",
            SystemExit,
        ),
        (
            "```bash\nlsq train-text --src other.en --tgt train.de --output o\n```",
            FileNotFoundError,
        ),
        ("```bash\nlsq numbers --output o ...\n```", SystemExit),
        ("```bash\nlsq no-such-command\n```", ValueError),
        ("```bash\nno-such-program\n```", AssertionError),
        ("```bash\necho 'not closed\n```", AssertionError),
        ("```bash\nmake no-such-target\n```", AssertionError),
        ("```bash\npython benchmarks/bench_step.py --no-such-option\n```", SystemExit),
        ("```bash\npython benchmarks/bench_no_such_file.py\n```", FileNotFoundError),
        ("```bash\npython benchmarks/compile_kernels.py\n```", ValueError),
        ("```bash\nrecipes/formats/run.sh messages runs/formats\n```", ValueError),
        ("```bash\ntorchrun --no-such-option train.py\n```", SystemExit),
        ("```bash\ntorchrun --nproc-per-node 2 train.py\n```", AssertionError),
        (
            "```bash\nmkdir data\ntorchrun --no-python lsq train data --max-tokens 9"
            " --no-such-option\n```",
            SystemExit,
        ),
        ("```bash\nrecipes/wmt14_en_de/run.sh o --no-such-option\n```", AssertionError),
    ],
)
def test_a_planted_mistake_is_found(reader, tmp_path, text, error):
    with pytest.raises(error):
        for block in blocks(page_of(tmp_path, text)):
            reader.read(block)


def test_a_failure_is_told_while_a_process_of_the_command_lives(tmp_path):
    """As those that load data do; they hold the pipes by which commands are answered."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))

    def fail(reader, words):
        forked.start()
        raise RuntimeError("no more batches")

    try:
        with pytest.raises(RuntimeError, match="no more batches"):
            Reader(tmp_path, ["lsq"], fail).run(["bash", "-c", "lsq generate; true"], fail)
        assert forked.is_alive()
    finally:
        forked.kill()
        forked.join()


def test_broken_links_are_found(tmp_path):
    text = "[a](page.md#a-title) [b](#gone) [c](gone.md) [d](https://example.org)\n\n# A `title`!\n"
    assert broken_links(page_of(tmp_path, text)) == ["#gone", "gone.md"]


def test_commands_run_in_order(reader, tmp_path):
    """A loop, a variable, one that makes data, one that needs them, and one that needs what an
    earlier block saved."""
    text = """```python
# script.py
x = 1
```

```bash
for number in 1 2; do
    lsq train-text --src train.en --tgt train.de --output "o$number" --prepare-only
done
wc -l o2/data/test.tgt
torchrun script.py
```

```output
... o2/data/test.tgt
```
"""
    for block in blocks(page_of(tmp_path, text)):
        reader.read(block)
    assert reader.namespace["x"] == 1

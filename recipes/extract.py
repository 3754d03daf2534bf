"""Plain sentence pairs from the archives of public translation tasks, or toy text for dry runs.

    python recipes/extract.py iwslt14 RAW TEXT     RAW: the unpacked de-en.tgz
    python recipes/extract.py wmt14 RAW TEXT       RAW: the archives of wmt14_en_de/prepare.sh
    python recipes/extract.py toy TEXT

writes TEXT/{train,valid,test}.{de,en}, one sentence a line; line i of one language translates line
i of the other.
"""

import argparse
import html
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LANGUAGES = ("de", "en")
SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>", re.DOTALL)
IWSLT_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
WMT_CORPORA = ("training/europarl-v7", "commoncrawl", "training/news-commentary-v9")
METADATA = ("<url>", "<talkid>", "<keywords>", "<speaker>", "<reviewer", "<translator")
Pair = tuple[str, str]
"""A German sentence and its English translation."""


def lines(path: Path) -> list[str]:
    """Read the lines of a text file, without white space around them; U+2028 and the like do not
    end lines."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; see --download of prepare.sh")
    return [" ".join(line.split()) for line in path.read_text(encoding="utf-8").split("\n")]


def paired(sides: list[list[str]]) -> list[Pair]:
    """Pair equally long sides."""
    german, english = sides
    if len(german) != len(english):
        raise ValueError(f"{len(german)} German lines, but {len(english)} English ones")
    return list(zip(german, english, strict=True))


def segments(path: Path) -> list[str]:
    """Read the sentences of an SGML or XML file of an evaluation."""
    text = "\n".join(lines(path))
    return [" ".join(html.unescape(segment).split()) for segment in SEGMENT.findall(text)]


def acceptable(pair: Pair, longest: int, ratio: float = 1.5) -> bool:
    """Say whether both sides have 1 to `longest` words, and neither more than `ratio` times those
    of the other."""
    counts = sorted(len(side.split()) for side in pair)
    return 1 <= counts[0] and counts[1] <= min(longest, ratio * counts[0])


def write(folder: Path, split: str, pairs: Iterable[Pair]) -> None:
    """Write folder/split.de and folder/split.en."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(pairs)
    if not pairs:
        raise ValueError(f"no sentence pair is left for {split}")
    for side, language in enumerate(LANGUAGES):
        content = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{split}.{language}").write_text(content, encoding="utf-8", newline="\n")
    print(f"{split}: {len(pairs)} pairs")


def every(pairs: list[Pair], step: int) -> tuple[list[Pair], list[Pair]]:
    """Return (all others, every `step`-th pair from the first on)."""
    return [pair for row, pair in enumerate(pairs) if row % step], pairs[::step]


def iwslt14(raw: Path, text: Path) -> None:
    """Write talks: train and valid (every 23rd pair) from the tagged file, test from five earlier
    evaluations."""
    sides = []
    for language in LANGUAGES:
        tagged = lines(raw / "de-en" / f"train.tags.de-en.{language}")
        spoken = [line for line in tagged if not line.startswith(METADATA)]
        sides.append([re.sub(r"</?(title|description)>", "", line).strip() for line in spoken])
    train, valid = every([pair for pair in paired(sides) if acceptable(pair, longest=175)], 23)
    test = [pair for name in IWSLT_TESTS for pair in paired(_evaluation(raw / "de-en", name))]
    for split, pairs in (("train", train), ("valid", valid), ("test", test)):
        write(text, split, pairs)


def _evaluation(folder: Path, name: str) -> list[list[str]]:
    return [segments(folder / f"IWSLT14.{name}.de-en.{language}.xml") for language in LANGUAGES]


def wmt14(raw: Path, text: Path) -> None:
    """Write parliament, web pages and news: valid is every 1,000th pair, test is newstest2014."""
    pairs = []
    for corpus in WMT_CORPORA:
        found = paired([lines(raw / f"{corpus}.de-en.{language}") for language in LANGUAGES])
        pairs += [pair for pair in found if acceptable(pair, longest=250)]
    train, valid = every(pairs, 1000)
    names = (f"newstest2014-deen-{kind}.sgm" for kind in ("ref.de", "src.en"))
    test = [segments(raw / "test-full" / name) for name in names]
    for split, split_pairs in (("train", train), ("valid", valid), ("test", paired(test))):
        write(text, split, split_pairs)


def toy(text: Path) -> None:
    """Write random English number words and the German ones in the opposite order."""
    english = "one two three four five six seven eight nine ten".split()
    german = "eins zwei drei vier fünf sechs sieben acht neun zehn".split()
    chance = random.Random(1)

    def sentences(count: int) -> Iterator[Pair]:
        for _ in range(count):
            words = chance.choices(range(10), k=chance.randint(2, 8))
            turned = " ".join(german[word] for word in reversed(words))
            yield turned, " ".join(english[word] for word in words)

    for split, count in (("train", 300), ("valid", 20), ("test", 10)):
        write(text, split, sentences(count))


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("iwslt14", "wmt14", "toy"))
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    given = parser.parse_args()
    wanted = 1 if given.task == "toy" else 2
    if len(given.folders) != wanted:
        parser.error(f"{given.task} takes {wanted} folders, but {len(given.folders)} are given")
    try:
        {"iwslt14": iwslt14, "wmt14": wmt14, "toy": toy}[given.task](*given.folders)
    except (OSError, ValueError) as error:
        print(f"extract.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Files as they come from broken disks, other programs and tired people, from a seed."""

import copy
import json
import math
import random
import re
from typing import Any

NUMBERS = "0 -1 1 -0 NaN inf -Infinity 1e308 1e400 0.5 1e-320".split()
NUMBERS += ["9" * 5000, "", " 7 "]
NUMBERS += [str(number) for number in (2**63, -(2**63) - 1, 2**62, 2**31, 2**64)]
NUMBERS += "1_000 ٣ ² 0x10 +5 1,5".split()
STRANGE = [None, True, False, 0, -1, 1, 16, 2**31, 2**64, 1e308, 0.5, math.inf, math.nan]
STRANGE += [[], {}, [[]], {"a": {"b": 1}}, "", "x", "\x00", "\ud800", "a" * 999]
STRANGE += [*"1 nt tn int8 as_is nk matmul".split(), "00" * 64, [[[[[[[[[]]]]]]]]]]
PIECES = rb"[ { \" } ] , : - 9 e9 \u NaN".replace(b'\\"', b'"').split()
PIECES += [b"\0", b"\xef\xbb\xbf", b"\n", b"\r", "\u2028".encode(), b"\xff", b"\xed\xa0\x80"]
PIECES += [b"\t", b"'", b"%s", b"../", "\u202e".encode(), "👩‍👩‍👧".encode()]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip bits; cut, double, move or replace bytes; swap blocks."""
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        start = chance.randrange(len(found) + 1)
        stop = min(len(found), start + chance.choice([1, 2, 10, 100, 4000]))
        piece = bytes(found[start:stop])
        kind = chance.randrange(10)
        if kind in (0, 1) and start < len(found):
            found[start] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del found[start:stop]
        elif kind == 3:
            found[start:start] = piece * chance.choice([1, 50])
        elif kind == 4:
            place = chance.randrange(len(found) + 1)
            found[place:place] = piece
        elif kind == 5:
            del found[start:]
        elif kind == 6:
            found[start:stop] = chance.choice(PIECES)
        elif kind == 7:
            found[start:stop] = chance.randbytes(len(piece))
        elif kind == 8:
            middle = chance.randrange(len(found) + 1)
            found = found[middle:] + found[:middle]
        else:
            repeated = chance.choice([b"[", b'{"a":', b"9", b"\0", b"word "])
            found[start:start] = repeated * chance.choice([1, 30, 5000])
    return bytes(found)


def mutated_text(content: bytes, chance: random.Random) -> bytes:
    """As bytes, or with other numbers, encodings, line ends, byte order marks, huge lines."""
    kind = chance.randrange(12)
    if kind == 0:
        return _with_number(content, chance)
    if kind == 1:
        encoding = chance.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp037"])
        return content.decode("utf-8", "replace").encode(encoding, "replace")
    if kind == 2:
        ends = [b"\r\n", b"\r", b"\n\n", b"", b"\0", "\u2028".encode(), b"\x85"]
        return content.replace(b"\n", chance.choice(ends))
    if kind == 3:
        lines = content.split(b"\n")
        line = chance.randrange(len(lines))
        old = lines[line]
        strange = [b"", old * 3000, b" ", b"a" * 200_000, b"\0" * 3000, b'"' + old]
        lines[line] = chance.choice(strange)
        return b"\n".join(lines)
    if kind == 4:
        lines = content.split(b"\n")
        line, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        here, there = lines[line], lines[other]
        lines[line], lines[other] = there, here if chance.random() < 0.5 else there
        return b"\n".join(lines)
    if kind == 5:
        empty = [b"", b"\n", b"\0", b"\xef\xbb\xbf", b" \n \n"]
        return chance.choice([*empty, content + content, content.strip() + b"\0"])
    return mutated_bytes(content, chance)


def mutated_table(content: bytes, chance: random.Random) -> bytes:
    """As text, or with columns that go, come, change places or separators."""
    rows = [line.split(b",") for line in content.split(b"\n")]
    row = chance.choice(rows)
    column = chance.randrange(len(row))
    kind = chance.randrange(12)
    if kind == 0:
        del row[column]
    elif kind == 1:
        row.insert(column, chance.choice(row))
    elif kind == 2:
        row[column] = chance.choice([*NUMBERS, "x", '"', '""', "-", "id", "a" * 200_000]).encode()
    elif kind == 3:
        chance.shuffle(row)
    elif kind == 4:
        for each in rows:
            del each[min(column, len(each) - 1)]
    elif kind == 5:
        return content.replace(b",", chance.choice([b";", b"\t", b", ", b",,"]))
    else:
        return mutated_text(content, chance)
    return b"\n".join(b",".join(each) for each in rows)


def mutated_json(content: bytes, chance: random.Random) -> bytes:
    """As text, or with values of other types, sizes and depths."""
    if chance.random() < 0.5:
        return mutated_text(content, chance)
    values = mutated_values(json.loads(content), chance, STRANGE)
    indent, ordered = chance.choice([None, 3]), chance.random() < 0.1
    return json.dumps(values, indent=indent, sort_keys=ordered).encode()


def mutated_values(content: Any, chance: random.Random, strange: list[Any]) -> Any:
    """Replace, remove or change a value in dicts and lists, or put it under another name."""
    content = copy.deepcopy(content)
    places = []
    stack = [content]
    while stack:
        inner = stack.pop()
        names = list(inner) if isinstance(inner, dict) else range(len(inner))
        places += [(inner, name) for name in names]
        stack += [inner[name] for name in names if isinstance(inner[name], (dict, list))]
    inner, name = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        del inner[name]
    elif kind == 1 and isinstance(inner, dict):
        inner[chance.choice(["extra", "M", "", "k", "format"])] = inner[name]
    elif kind == 1:
        inner.append(inner[name])
    elif kind == 2:
        other, key = chance.choice(places)
        inner[name] = copy.deepcopy(other[key])
    elif kind == 3 and (
        numbers := [place for place in places if type(place[0][place[1]]) in (int, float)]
    ):
        inner, name = chance.choice(numbers)
        old = inner[name]
        inner[name] = chance.choice([2 * old, old + 1, old / 2, old - 1, -old])
    else:
        inner[name] = copy.deepcopy(chance.choice(strange))
    return content


def _with_number(content: bytes, chance: random.Random) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return content + chance.choice(NUMBERS).encode()
    place = chance.choice(found)
    return content[: place.start()] + chance.choice(NUMBERS).encode() + content[place.end() :]


NONSENSE = [*NUMBERS, " ", *"x -- - -x none True [] {} (1, ../.. . missing/file %s".split()]
NONSENSE += ["a" * 5000, "\udcff", "👩‍👩‍👧", "$(touch planted)"]
NONSENSE += "{0} int8,float a:b @given 2 3 16 100".split()


def mutated_options(words: list[str], chance: random.Random, known: list[str]) -> list[str]:
    """Replace, repeat, swap or leave out words; cut options, or add those that are `known`."""
    words = list(words)
    for _ in range(chance.choice([1, 1, 2])):
        place = chance.randrange(len(words)) if words else 0
        kind = chance.randrange(9)
        if kind == 0 or not words:
            unknown = ["--unknown", "-q", "--lsq-nothing", "--", "extra"]
            words[place:place] = [chance.choice(unknown)]
        elif kind in (1, 2, 3):
            name = chance.choice(known or ["--help"])
            added = [name, *chance.choices(NONSENSE, k=chance.choice([0, 1, 1, 2]))]
            words += ["=".join(added)] if chance.random() < 0.2 else added
        elif kind == 4:
            del words[place]
        elif kind == 5:
            words[place:place] = [words[place]]
        elif kind == 6:
            other = chance.randrange(len(words))
            words[place], words[other] = words[other], words[place]
        elif words[place].startswith("--"):
            words[place] = words[place][: chance.randrange(2, 1 + len(words[place]))]
        else:
            words[place] = chance.choice(NONSENSE)
    return words

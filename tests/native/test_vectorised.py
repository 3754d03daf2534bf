"""That the compiler vectorises every loop that asks for it: one that it cannot, for a store of
bytes that might change what the loop reads through a reference, say, takes several times as long,
and nothing else shows it.
"""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sampling import first
from tests.test_setup import ROOT, build  # noqa: F401

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="needs g++, which says what it vectorises"
    ),
]
VECTORISED = re.compile(r"([\w.]+):(\d+):\d+: optimized: loop vectorized")


def marked(path: Path) -> dict[tuple[str, int], str]:
    """(file, line) -> text of each loop behind `#pragma omp simd`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        (path.name, number + 1): line.strip()
        for number, (before, line) in enumerate(zip(lines, lines[1:], strict=False), 1)
        if before.lstrip().startswith("#pragma omp simd")
    }


@pytest.mark.timeout(400)  # a minute on a quiet machine
@pytest.mark.parametrize("level", first(["libcpu_v3", "libcpu_v4"], 0, 1))
def test_every_loop_that_asks_for_it_is_vectorised(build, level):  # noqa: F811
    if level not in build.LEVELS:
        pytest.skip("another kind of processor")

    def vectorised(source: str) -> set[tuple[str, int]]:
        command = [
            "g++",
            *build.COMPILE_FLAGS,
            *build.LEVELS[level],
            "-fopt-info-vec-optimized",
            "-c",
            source,
        ]
        told = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr
        return {(name, int(line)) for name, line in VECTORISED.findall(told)}

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "lsq/csrc/cpu").glob("*.cpp"))
    with ThreadPoolExecutor(2) as pool:
        found = set().union(*pool.map(vectorised, sources))
    loops = {
        place: text
        for path in (ROOT / "lsq/csrc/cpu").glob("*.[ch]*")
        for place, text in marked(path).items()
    }
    assert len(loops) > 40
    # The compiler names the line of the pragma, of the loop, or of what is in it.
    missed = [
        place
        for place in loops
        if found.isdisjoint((place[0], place[1] + further) for further in range(-1, 3))
    ]
    assert missed == []

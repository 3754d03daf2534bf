"""What `make test` runs of multiplied options, and what a run leaves out and says about it."""

from itertools import combinations, product

import pytest
import torch

from tests import sampling

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("c", [None, 1.0])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (1, 2)])
def test_multiplied(a, b, c, d, e):
    pass

TWO = range(2)

@pytest.mark.parametrize("a, b, c", [(a, b, c) for a in TWO for b in TWO for c in TWO])
def test_listed(a, b, c):
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("place", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_twice(place):
    pass
"""
MULTIPLIED = 36
IN_THE_EMULATOR = """
import pytest

@pytest.mark.parametrize("place", ["cpu", "emulator"])
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("c", [None, 1.0])
def test_it(place, a, b, c):
    pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """suite(*arguments) runs SUITE on a machine without a GPU, in this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hooks = "pytest_collection_modifyitems, pytest_testnodedown, pytest_terminal_summary"
    pytester.makeconftest(f"from tests.conftest import {hooks}  # noqa: F401")
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    slow\n    thorough\n")
    pytester.makepyfile(test_it=SUITE)
    return lambda *arguments: pytester.runpytest_inprocess("-p", "no:hypothesispytest", *arguments)


def pairs(combination: dict) -> set:
    return set(combinations(sorted(combination.items()), 2))


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 2, 2, 2, 2), (5, 4, 3, 2), (7, 2, 1)])
def test_every_pair_is_in_the_sample(sizes):
    given = [dict(zip("abcde", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = sampling.pairwise(given)
    found = set().union(*(pairs(given[number]) for number in chosen))
    assert found == set().union(*map(pairs, given))
    largest, second = sorted(sizes)[-1:-3:-1]
    assert largest * second <= len(chosen) < 2 * largest * second
    assert chosen == sorted(chosen) == sampling.pairwise(given)


@pytest.mark.parametrize(
    "several, few, times", [(12, 5, 2), (21, 7, 3), (4, 2, 1), (5, 2, 1), (3, 1, 2), (2, 3, 3)]
)
def test_all_of_two_options_are_run_in_turn(several, few, times):
    found = sampling.in_turn(range(several), range(few), times)
    assert [one.values for one in found] == [(a, b) for a in range(several) for b in range(few)]
    chosen = [one.values for one in found if not one.marks]
    assert len(chosen) == several * min(times, few)
    assert {a for a, _ in chosen} == set(range(several)) and {b for _, b in chosen} == set(
        range(few)
    )


def test_what_is_not_multiplied():
    """One or two options are run whole; combinations that are left out of a product are not
    missed."""
    assert sampling.pairwise([{"a": value} for value in range(9)]) == list(range(9))
    assert len(sampling.pairwise([{"a": a, "b": b} for a in range(3) for b in range(4)])) == 12
    assert sampling.pairwise([]) == []
    three = range(3)
    given = [{"a": a, "b": b, "c": c} for a in three for b in three for c in three if a != b]
    chosen = sampling.pairwise(given)
    found = set().union(*(pairs(given[number]) for number in chosen))
    assert found == set().union(*map(pairs, given))


def test_a_run_leaves_out_what_it_says(suite):
    result = suite()
    passed = result.parseoutcomes()["passed"]
    left_out = MULTIPLIED + 8 + 1 - passed
    # those listed, the emulator's, and nine or a few more of three by three
    assert 8 + 1 + 9 <= passed < 8 + 1 + 14
    result.stdout.fnmatch_lines([f"left out: {left_out} tests for `make test-thorough`"])
    result.stdout.fnmatch_lines(["left out: 1 test marked slow (`pytest -m slow`, or by name)"])
    result.stdout.fnmatch_lines(["left out: 1 test for a CUDA GPU (torch sees none here)"])


def test_the_rest_runs_where_it_is_asked_for(suite):
    plain = suite().parseoutcomes()["passed"]
    result = suite("-m", "thorough or slow")
    assert plain + result.parseoutcomes()["passed"] == MULTIPLIED + 8 + 1 + 1
    assert "make test-thorough" not in result.stdout.str()


def test_the_emulator_runs_one_combination_and_then_every_pair(suite, pytester):
    pytester.makepyfile(test_it=IN_THE_EMULATOR)
    for options, on_the_cpu, emulated in (
        ((), 9, 1),
        (("-m", "thorough and not slow"), 9, 8),
        (("-m", "slow"), 0, 9),
    ):
        for place, count in (("cpu", on_the_cpu), ("emulator", emulated)):
            found = suite("-k", place, *options).parseoutcomes()
            assert found.get("passed", 0) == count, (place, options)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("test_multiplied", MULTIPLIED),
        ("test_slow", 1),
        ("test_multiplied[1-1-1.0-y-3]", 1),
        ("test_twice", 1),
    ],
)
def test_what_is_named_runs(suite, pytester, name, count):
    assert suite(f"test_it.py::{name}").parseoutcomes()["passed"] == count
    assert suite(f"{pytester.path}/test_it.py::{name}").parseoutcomes()["passed"] == count


def test_on_a_gpu_its_tests_run(suite, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = suite("-k", "twice")
    assert result.parseoutcomes()["passed"] == 2 and "CUDA GPU" not in result.stdout.str()


@pytest.mark.thorough
def test_processes_that_share_the_tests_say_so_too(suite):
    pytest.importorskip("xdist")
    result = suite("--numprocesses", "1")
    result.stdout.fnmatch_lines(["left out: * tests for `make test-thorough`"])
    result.stdout.fnmatch_lines(["left out: 1 test for a CUDA GPU (torch *"])


def test_first():
    few = sampling.first([1, (2, "a"), 3], 2)
    assert [one.values for one in few] == [(1,), (2, "a"), (3,)]
    assert [[mark.name for mark in one.marks] for one in few] == [[], [], ["thorough"]]
    fewer = sampling.first("abcd", 1, 2)
    marks = [[mark.name for mark in one.marks] for one in fewer]
    assert marks == [[], ["thorough"], ["thorough"], ["slow"]]


def test_a_folder_that_is_passed_over_fails_the_run_of_all_tests(pytester):
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems  # noqa: F401")
    pytester.makeini("[pytest]\ntestpaths = suite\n")
    for folder in ("one", "dist"):
        file = pytester.path / "suite" / folder / f"test_{folder}.py"
        file.parent.mkdir(parents=True)
        file.write_text("def test_it():\n    pass\n")
    found = pytester.runpytest_inprocess("-p", "no:hypothesispytest")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines("*no test was collected in *suite/dist; *")
    pytester.makeini("[pytest]\ntestpaths = suite\nnorecursedirs = .*\n")
    pytester.runpytest_inprocess("-p", "no:hypothesispytest").assert_outcomes(passed=2)

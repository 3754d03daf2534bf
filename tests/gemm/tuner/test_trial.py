"""Candidates are compared fairly: wrong ones refused, slow ones dropped, the default kept if in
doubt."""

import pytest

from lsq.gemm.configuration import CublasConfiguration
from lsq.gemm.tuner.trial import Settings, compare, entry_fault
from tests.gemm.tuned import entry
from tests.gemm.tuner.fakes import FakeBackend, FakeTrial, way

SETTINGS = Settings(rounds=5, final_rounds=5, seconds=0.1)
ENTRY = entry(8, configuration=way(96))


def outcome(times, settings=SETTINGS, **options):
    trial = FakeTrial(
        times, **{name: options.pop(name) for name in ("faults", "clock") if name in options}
    )
    return compare(trial, [way(rows) for rows in times], settings, **options), trial


def test_the_fastest_is_chosen():
    found, trial = outcome({0: 1.0, 1: 0.9, 2: 0.8, 3: 0.85})
    assert found.configuration == way(2)
    assert (found.chosen, found.default, found.float, found.spread) == (0.8, 1.0, 10.0, 0.0)
    assert all(trial.measured.values()) and not found.refused and found.complete


class Other(CublasConfiguration):
    """Another kind of way."""


@pytest.mark.parametrize(
    ("times", "chosen", "other"),
    [
        ({0: 1.0, 1: 0.9, -2: 0.7, -3: 0.8}, 2, 0.9),
        ({0: 1.0, 1: 0.6, -2: 0.9, -3: 0.8}, 1, 0.8),
        ({-4: 1.0, 1: 0.3, -2: 5.0}, 1, 1.0),
        ({0: 1.0, 1: 0.9}, 1, None),
        ({0: 1.0, 1: 0.3, -2: 5.0}, 1, None),
    ],
)
def test_the_best_of_the_other_kind_is_measured_beside_the_chosen(times, chosen, other):
    ways = [Other(**vars(way(-number))) if number < 0 else way(number) for number in times]
    found = compare(
        FakeTrial({abs(number): time for number, time in times.items()}), ways, SETTINGS
    )
    assert (found.configuration.workspace_bytes, found.other) == (chosen, other)


def test_wrong_results_are_refused_before_they_are_timed():
    found, trial = outcome({0: 1.0, 1: 0.1, 2: 0.8}, faults={1: "row 3 is wrong"})
    assert found.configuration == way(2)
    assert found.refused == ((way(1), "row 3 is wrong"),)
    assert ("timed", 1) not in trial.log
    for rows in (0, 2):
        assert trial.log.index(("checked", rows)) < trial.log.index(("timed", rows))


def test_a_wrong_default_is_an_error():
    with pytest.raises(RuntimeError, match="wrong as it runs untuned .*: row 0"):
        outcome({0: 1.0, 1: 0.5}, faults={0: "row 0"})


def test_gains_within_the_spread_keep_the_default():
    noisy = {0: 1.0, 1: lambda number: 0.97 + 0.06 * (number % 3 - 1)}
    found, _ = outcome(noisy)
    assert found.configuration == way(0) and found.chosen == found.default


def test_a_drift_of_the_clock_cancels():
    """Both get slower by a half from round to round, which is far more than the gain."""
    drifting = {
        rows: lambda number, base=base: base * 1.5**number
        for rows, base in {0: 1.0, 1: 0.95}.items()
    }
    assert outcome(drifting)[0].configuration == way(1)


def test_luck_in_the_first_rounds_is_not_enough():
    lucky = {0: 1.0, 1: lambda number: 0.5 if number <= SETTINGS.rounds else 1.01}
    assert outcome(lucky)[0].configuration == way(0)


def test_slow_candidates_are_dropped_early():
    times = {0: 1.0, 1: 0.9, 2: 1.3, 3: 1.7, 4: 5.0}
    found, trial = outcome(times)
    assert found.configuration == way(1)
    final = SETTINGS.final_rounds
    assert trial.measured == {0: 1 + 5 + final, 1: 1 + 5 + final, 2: 3, 3: 2, 4: 1}
    found, _ = outcome({0: 9.0, 1: 1.0, 2: 1.01})  # but not the default
    assert (found.configuration, found.default) == (way(1), 9.0)


def test_the_screening_leaves_so_many_finalists():
    settings = Settings(rounds=3, final_rounds=3, finalists=2)
    times = {0: 1.0, **{rows: 0.5 + rows / 100 for rows in range(1, 10)}}
    _, trial = outcome(times, settings)
    assert [rows for rows, count in trial.measured.items() if count > 1] == [0, 1, 2]


def test_rounds_are_interleaved_and_turn_back():
    _, trial = outcome({0: 1.0, 1: 0.99, 2: 0.98}, Settings(rounds=3, final_rounds=3))
    timed = [rows for what, rows in trial.log if what == "timed"]
    assert timed[3:12] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_no_candidate_is_taken_up_after_the_deadline():
    trial = FakeTrial({0: 1.0, 1: 0.9, 2: 0.1})
    found = compare(trial, [way(0), way(1), way(2)], SETTINGS, deadline=3.0, clock=trial.clock)
    assert not found.complete and not trial.measured[2] and found.configuration == way(1)
    trial = FakeTrial({0: 1.0, 1: 0.9})
    found = compare(trial, [way(0), way(1)], SETTINGS, deadline=-1.0, clock=trial.clock)
    assert found.configuration == way(0) and not trial.measured[1]


def test_an_entry_is_run_once():
    backend = FakeBackend({96: 1.0})
    assert entry_fault(ENTRY, backend.trial) is None
    (trial,) = backend.trials
    assert backend.keys == [ENTRY.key] and trial.log == [("checked", 96)] and trial.closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faults": {96: "row 3 is wrong"}}, "row 3 is wrong; tune this product again"),
        (
            {"before": RuntimeError("no memory")},
            "it does not run here (no memory); tune this product again",
        ),
        ({"before": ValueError("bad")}, "it does not run here (bad); tune this product again"),
    ],
)
def test_faults_of_an_entry(options, message):
    def fail(key):
        raise options["before"]

    backend = FakeBackend({96: 1.0}, **options | ({"before": fail} if "before" in options else {}))
    assert entry_fault(ENTRY, backend.trial) == message
    assert all(trial.closed for trial in backend.trials)


def test_entries_that_no_memory_holds_are_not_run():
    backend = FakeBackend({96: 1.0})
    fault = entry_fault(entry(2**31 - 32, n=2**31 - 1, configuration=way(96)), backend.trial)
    assert (
        fault.startswith("not run, because its operands and its result take") and not backend.trials
    )

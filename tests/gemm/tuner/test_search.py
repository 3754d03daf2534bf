"""The tuner's file holds all that is done, whatever happens; two tuners do not mix."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from lsq.files.lock import locked_file
from lsq.gemm import configuration_file
from lsq.gemm.tuner.search import tune
from lsq.gemm.tuner.trial import Settings
from tests.gemm.tuned import GPU, key
from tests.gemm.tuner.fakes import FakeBackend, way

SETTINGS = Settings(rounds=3, final_rounds=3, seconds=1e-9, confirmations=0)
KEYS = [key(64), key(32), key(100)]
TIMES = {512: 1.0, 7: 0.5}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "file.json"


def run(path, backend=None, keys=KEYS, validators=GPU, settings=SETTINGS, **options):
    backend = backend or FakeBackend(TIMES)
    return tune(
        backend.trial, keys, path, validators, settings=settings, clock=backend.clock, **options
    ), backend


def known(path):
    return [entry.key for entry in configuration_file.read(path).entries]


def test_entries_are_written(path):
    summary, backend = run(path)
    file = configuration_file.read(path)
    assert file.validators == GPU
    assert {entry.key for entry in file.entries} == set(KEYS) and backend.keys == KEYS
    for entry in file.entries:
        assert entry.configuration == way(7) and entry.gain == 2
        assert (entry.times.chosen, entry.times.default, entry.times.float) == (5e5, 1e6, 1e7)
    assert len(summary.entries) == 3 and (summary.skipped, summary.left, summary.interrupted) == (
        0,
        0,
        False,
    )
    assert all(trial.closed for trial in backend.trials)


@pytest.mark.parametrize(
    ("elsewhere", "kept"), [({512: 1.0, 7: 0.5}, 7), ({512: 1.0, 7: 0.99}, 512)]
)
def test_the_best_must_win_again_on_other_memory(path, elsewhere, kept):
    class Backend(FakeBackend):
        def trial(self, asked):
            self.times = elsewhere if self.trials else TIMES
            return super().trial(asked)

    settings = dataclasses.replace(SETTINGS, confirmations=2)
    _, backend = run(path, Backend(TIMES), keys=KEYS[:1], settings=settings)
    (entry,) = configuration_file.read(path).entries
    assert entry.configuration == way(kept)
    assert len(backend.trials) == (3 if kept == 7 else 2) and all(
        trial.closed for trial in backend.trials
    )


def test_keys_that_round_to_one_are_tuned_once(path):
    _, backend = run(path, keys=[key(1000), key(1024), key(993)])
    assert backend.keys == [key(1024)]


def test_what_has_an_entry_is_skipped_unless_again(path):
    run(path, keys=KEYS[:2])
    summary, backend = run(path)
    assert backend.keys == KEYS[2:] and summary.skipped == 2 and len(known(path)) == 3
    slower = FakeBackend({512: 4.0, 7: 8.0})
    summary, _ = run(path, slower, again=True)
    assert slower.keys == KEYS and summary.skipped == 0
    assert {entry.configuration for entry in configuration_file.read(path).entries} == {way(512)}


def test_interruption_keeps_what_is_done_and_the_next_run_goes_on(path):
    def stop(asked):
        if asked == KEYS[1]:
            raise KeyboardInterrupt

    summary, _ = run(path, FakeBackend(TIMES, before=stop))
    assert summary.interrupted and summary.left == 2 and known(path) == [KEYS[0]]
    summary, backend = run(path)
    assert backend.keys == KEYS[1:] and not summary.interrupted


def test_every_entry_is_on_the_disk_before_the_next_begins(path):
    seen = []
    run(path, FakeBackend(TIMES, before=lambda _: seen.append(path.exists() and len(known(path)))))
    assert seen == [False, 1, 2]


def test_products_that_fail_are_told_and_the_others_go_on(path):
    def fail(asked):
        if asked == KEYS[1]:
            raise RuntimeError("no such product")

    summary, _ = run(path, FakeBackend(TIMES, before=fail))
    assert (
        summary.failed == [(KEYS[1], "no such product")]
        and len(known(path)) == 2
        and summary.left == 0
    )
    wrong, _ = run(path, FakeBackend(TIMES, faults={512: "row 1"}), again=True)
    assert len(wrong.failed) == 3 and "untuned" in wrong.failed[0][1] and len(known(path)) == 2


def test_refused_candidates_are_counted(path):
    summary, _ = run(path, FakeBackend(TIMES, faults={7: "row 1"}))
    assert summary.refused == 3
    assert {entry.configuration for entry in configuration_file.read(path).entries} == {way(512)}


def test_the_time_is_kept_to(path):
    backend = FakeBackend(TIMES)
    one = run(path.with_name("one.json"), backend, keys=KEYS[:1])[1].clock.now
    summary, second = run(path, seconds=1.5 * one)
    assert second.keys == KEYS[:2] and summary.left == 1 and len(known(path)) == 2
    summary, third = run(path, seconds=one / 1000)
    assert len(third.keys) == 1 and summary.incomplete == 1


def test_progress_is_told(path):
    told = []
    run(path, keys=KEYS[:1])
    run(
        path,
        progress=lambda asked, outcome: told.append((asked, outcome and outcome.configuration)),
    )
    assert told == [(KEYS[1], way(7)), (KEYS[2], way(7))]  # KEYS[0] has an entry


def test_the_file_of_another_device_is_refused(path):
    run(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="another device: sm differs.*--output"):
        run(path, validators=dataclasses.replace(GPU, sm=100))
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_and_kept(path):
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"file\.json: this is not JSON"):
        run(path)
    assert path.read_text() == "{"


def test_a_second_tuner_is_refused(path):
    with locked_file(path, "choose another --output"):
        with pytest.raises(
            OSError, match=rf"process {os.getpid()} on .* is writing into .*file\.json; wait"
        ):
            run(path)
    run(path)
    assert len(known(path)) == 3


SCRIPT = """
import sys, time
from pathlib import Path
from tests.gemm.tuner.test_search import FakeBackend, TIMES, KEYS, run
def wait(asked):
    if asked == KEYS[1]:
        print("tuning", flush=True)
        time.sleep(60)
summary, _ = run(Path(sys.argv[1]), FakeBackend(TIMES, before=wait))
print("interrupted" if summary.interrupted else "done")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_leave_a_whole_file(path, number):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as tuning:
        assert tuning.stdout.readline() == "tuning\n"
        tuning.send_signal(number)
        rest = tuning.stdout.read()
    assert rest == ("interrupted\n" if number == signal.SIGINT else "")
    assert known(path) == [KEYS[0]]
    run(path)
    assert len(known(path)) == 3

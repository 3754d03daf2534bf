import dataclasses
import re

import pytest

from lsq.commands.stages import MARKER, Stage, differences, run_stage, write_json


@pytest.fixture
def stage(tmp_path):
    return Stage(name="stage", folder=tmp_path / "stage", makes=(re.compile("result.*"),))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_stage_runs_again_only_when_its_key_changes(stage):
    said, runs = [], []

    def work(folder):
        runs.append(names(folder))
        (folder / "result").write_text(f"{len(runs)}")

    run_stage(stage, {"size": 1}, work, said.append)
    run_stage(stage, {"size": 1}, work, said.append)
    assert runs == [[MARKER]] and said == ["stage: already done"]
    run_stage(stage, {"size": 2}, work, said.append)
    assert runs == [[MARKER], [MARKER]]  # from an empty folder again
    assert (stage.folder / "result").read_text() == "2"
    assert names(stage.folder) == [MARKER, "result"] and names(stage.folder.parent) == ["stage"]


def test_stages_that_fail_or_are_killed(stage):
    """What was there stays; a killed process removes nothing."""
    run_stage(stage, {"size": 1}, lambda folder: (folder / "result").write_text("old"), print)

    def fail(folder):
        (folder / "result").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(stage, {"size": 2}, fail, print)
    assert stage.is_done({"size": 1}) and (stage.folder / "result").read_text() == "old"
    assert names(stage.folder.parent) == ["stage"]
    left = stage.folder.with_name(".stage.partial")
    run_stage(dataclasses.replace(stage, folder=left), {}, lambda folder: None, print)
    (left / "result-half").write_text("x")
    run_stage(stage, {}, lambda folder: (folder / "result").write_text("whole"), print)
    assert names(stage.folder) == [MARKER, "result"] and not left.exists()


def test_only_what_the_stage_made_is_removed(stage, tmp_path):
    def work(folder):
        (folder / "result").write_text("x")

    run_stage(stage, {"size": 1}, work, print)
    (stage.folder / "notes.txt").write_text("mine")
    (stage.folder / "result-folder").mkdir()
    (tmp_path / "elsewhere").write_text("mine")
    (stage.folder / "result-link").symlink_to(tmp_path / "elsewhere")
    run_stage(stage, {"size": 2}, work, print)
    assert names(stage.folder) == [MARKER, "notes.txt", "result", "result-folder"]
    stage.remove()
    assert names(stage.folder) == ["notes.txt", "result-folder"]
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_files_of_somebody_else_are_refused(stage):
    stage.folder.mkdir()
    (stage.folder / "notes.txt").write_text("mine")
    stage.check_own()
    (stage.folder / "result.txt").write_text("mine, too")
    mark, empty = lambda: stage.mark({}, finished=True), lambda: stage.empty({})
    for act in (stage.check_own, stage.remove, mark, empty):
        with pytest.raises(ValueError, match="holds result.txt, which this command did not make"):
            act()
    assert names(stage.folder) == ["notes.txt", "result.txt"]


def test_what_stands_in_place_of_the_folder_is_refused(stage, tmp_path):
    Stage(name="other", folder=stage.folder, makes=()).mark({}, finished=True)
    with pytest.raises(ValueError, match="holds what the stage 'other' made, not 'stage'"):
        stage.check_own()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is not a folder"):
        dataclasses.replace(stage, folder=tmp_path / "file").check_own()


WRONG = b'{"stage": 1, "key": {}, "finished": true, "files": {}}'


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"stage": "stage"}', WRONG])
def test_a_damaged_marker_is_named(stage, content):
    stage.folder.mkdir()
    (stage.folder / MARKER).write_bytes(content)
    message = rf"{stage.folder / MARKER}: .*delete {stage.folder}, or choose another"
    with pytest.raises(ValueError, match=message):
        stage.is_done({})


def test_differences_name_both_values(tmp_path):
    write_json(tmp_path / "x.json", {"wort": "fünf"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "wort": "fünf"\n}\n'
    found = differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": True})
    assert found == ["b: 2 before, 3 now", "c: not given before, given now"]
    before, now = ({"file": name, "sha256": name * 20} for name in "ab")
    assert differences({"--src": before}, {"--src": {**before, "file": "moved"}}) == []
    shown = [f"{name} (its text has the checksum {name * 8})" for name in "ab"]
    said = [f"--src: {shown[0]} before, {shown[1]} now"]
    assert differences({"--src": before}, {"--src": now}) == said


@pytest.mark.parametrize(
    "before, now, said",
    [
        ({"--lsq-calibration-passes": "100"}, {}, []),
        ({"--lsq-calibration-passes": "100"}, {"--lsq-calibration-passes": "100"}, []),
        ({"--lsq-weight-init": "absmax"}, {}, []),
        ({"--lsq-weight-init": ["damaged"]}, {}, []),
        ({"--lsq-weight-init": "mse", "--lsq-activation-init": "mse"}, {}, []),
        (
            {"--lsq-weight-init": "absmax", "--lsq-activation-init": "absmax"},
            {},
            ["--lsq-clip-init: absmax before, not given now"],
        ),
        (
            {"--lsq-weight-init": "absmax", "--lsq-activation-init": "absmax"},
            {"--lsq-clip-init": "absmax"},
            [],
        ),
        (
            {},
            {"--lsq-clip-step": "0.01"},
            ["--lsq-clip-step: not given before, 0.01 now"],
        ),
    ],
)
def test_options_of_version_0_1_may_be_left_out(before, now, said):
    assert differences(before, now) == said

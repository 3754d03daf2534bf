import pytest

from lsq.commands.stages import differences, read_stamp, run_stage, write_json


def test_stage_runs_again_only_when_its_key_changes(tmp_path):
    said, runs = [], []

    def work(folder):
        runs.append(sorted(path.name for path in folder.iterdir()))
        (folder / "result").write_text("x")

    first = run_stage(tmp_path / "stage", {"size": 1}, work, said.append)
    assert run_stage(tmp_path / "stage", {"size": 1}, work, said.append) == first
    assert runs == [[]] and said == ["stage: already done"]
    assert run_stage(tmp_path / "stage", {"size": 2}, work, said.append) != first
    assert runs == [[], []]  # from an empty folder again


def test_interrupted_stage_runs_again(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path / "stage", {}, fail, print)
    assert read_stamp(tmp_path / "stage") is None
    seen = []
    run_stage(tmp_path / "stage", {}, lambda folder: seen.extend(folder.iterdir()), print)
    assert seen == []


def test_json_is_readable(tmp_path):
    write_json(tmp_path / "x.json", {"wort": "fünf"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "wort": "fünf"\n}\n'


def test_differences_name_both_values():
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b: 2 before, 3 now", "c: None before, 4 now"]

"""The folder of one run in an output folder: what its name may be, what lies there, and whom its
data belong to."""

import re
from dataclasses import dataclass
from pathlib import Path

from lsq.commands import stages
from lsq.commands.losses import LOSSES
from lsq.commands.prepare import Prepared
from lsq.commands.run_files import TRANSLATION
from lsq.commands.stages import Stage
from lsq.commands.train import CHECKPOINT
from lsq.fairseq.checkpoint import LAST
from lsq.fairseq.compatibility.checkpoints import updates_of

NAME = re.compile(r"\w[\w.+=@,-]*")
RESERVED = ("text", "vocabulary", "data", "numbers")
"""Folders of an output folder that are not runs."""
STAGE = "run"
RESIDUALS = re.compile(r"checkpoint_last\.gradients-rank-(\d+)-of-(\d+)\.safetensors")
"""Files that error feedback of version 0.1 wrote."""
UPDATES = "--max-update"
"""In the key of a model: how many updates are wanted, to which it is not bound."""
SOURCES = ("--lsq-from", "--finetune-from-model", "--restore-file")
"""Options that name a checkpoint to start from."""


def check_name(name: str) -> str:
    """A name of a run, as it was given.

    Raises:
        ValueError: it is not one plain folder name, or is one that the output folder has for
            something else.
    """
    if not NAME.fullmatch(name) or len(name.encode()) > 200:
        raise ValueError(
            f"--name {name!r} is not a plain folder name: letters, digits and _ . + = @ , - are"
            " allowed, the first of"
            " them a letter, digit or _; to write elsewhere, give --output"
        )
    if name.casefold() in RESERVED:
        raise ValueError(
            f"--name {name} is the name of a folder of the data; choose any but"
            f" {', '.join(RESERVED)}"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """output/<name>, with the stages in it."""

    prepared: Prepared
    name: str
    remedy: str = "choose another --name, or delete it with --overwrite"
    """What the user can do who does not want what is there, for messages."""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.prepared.output / self.name

    @property
    def run(self) -> Stage:
        """All of it; its key is what the run is bound to."""
        return Stage(name=STAGE, folder=self.path, makes=("results.json", "losses.png"))

    @property
    def model(self) -> Stage:
        """The training."""
        makes = (CHECKPOINT, RESIDUALS, LOSSES, "train.log", "crash.pt")
        return Stage(name="model", folder=self.path / "model", makes=makes)

    @property
    def translation(self) -> Stage:
        """The translation of the test set."""
        makes = ("hypotheses.txt", "generate-test.txt", "generate.log")
        return Stage(name="translation", folder=self.path / TRANSLATION, makes=makes)

    def updates(self) -> int:
        """Updates that the training has made, by its last checkpoint; 0 without one.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        last = self.model.folder / LAST
        return updates_of(last) if last.exists() else 0

    def goes_on(self, key: dict) -> bool:
        """Whether a run of this key has begun here.

        Raises:
            ValueError: the folder holds files of somebody else.
        """
        return not self._differences(key) and self.run.check_own() is not None

    def check(self, key: dict, updates: int, overwrite: bool) -> None:
        """Make sure that a run with this key may be begun here or go on, and that no other run
        loses its data.

        Nothing is written.

        Args:
            key: what the run is bound to: settings of the data and of the training.
            updates: that are wanted.
            overwrite: whether what is here may be removed.

        Raises:
            ValueError: it may not; names every option that differs, with both values.
        """
        check_data(self.prepared, except_run=self.name)
        self.translation.check_own()
        found = self._differences(key)
        if overwrite:
            if found or updates < self.updates():
                self._check_sources(key)
            return
        if found and any(path.suffix == ".pt" for path in self.model.made()):
            of_data = any(entry.partition(": ")[0] in self.prepared.settings for entry in found)
            raise ValueError(
                f"{self.path} holds a run with other options ({'; '.join(found)});"
                f" {self.remedy.replace('--name', '--output') if of_data else self.remedy}"
            )
        made = 0 if found else self.updates()
        if updates < made:
            raise ValueError(
                f"--updates is {updates}, but {self.path} has made {made} already; give at least"
                f" {made}, or"
                f" {self.remedy}"
            )

    def claim(self, key: dict, updates: int) -> None:
        """Mark the folder as that of a run with this key; what another run left there is removed.

        So is what this one left, if it has made more updates than are wanted: see `check`.

        Raises:
            ValueError: the folder holds files of somebody else.
        """
        if self._differences(key) or updates < self.updates():
            for stage in (self.translation, self.model, self.run):
                stage.remove()
        self.run.mark(key, finished=False)

    def _differences(self, key: dict) -> list[str]:
        """What differs between a key and those in the markers of the run and of its model."""
        markers = [stage.check_own() for stage in (self.run, self.model)]
        keys = [{**marker.key, UPDATES: None} for marker in markers if marker is not None]
        return next(filter(None, (stages.differences(before, key) for before in keys)), [])

    def _check_sources(self, key: dict) -> None:
        for option in SOURCES:
            source = key.get(option)
            if source is not None and Path(source).resolve().is_relative_to(self.path.resolve()):
                raise ValueError(
                    f"{option} {source} is of the run that --overwrite removes; choose another"
                    " --name"
                )


def check_data(prepared: Prepared, except_run: str | None = None) -> None:
    """Make sure that the data which are about to be made are those of all runs in the output
    folder.

    Raises:
        ValueError: a run other than `except_run` was trained on others; names it and what differs.
    """
    for path in sorted(prepared.output.glob(f"[!.]*/{stages.MARKER}")):
        name, marker = path.parent.name, stages.read_marker(path.parent)
        if name == except_run or marker is None or marker.stage != STAGE:
            continue
        key = marker.key
        if found := stages.differences(
            {option: key.get(option) for option in prepared.settings}, prepared.settings
        ):
            raise ValueError(
                f"{prepared.output} holds the data of the run {name}, which were made with other"
                " options"
                f" ({'; '.join(found)}); choose another --output"
            )

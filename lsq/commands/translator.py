"""`lsq.Translator`: text by a run of `lsq train-text`, a checkpoint, or an exported file."""

from os import PathLike
from pathlib import Path

from lsq import extras
from lsq.commands import logs, run_files
from lsq.files import check_name
from lsq.run.backends import Backend, backend
from lsq.serving import model_file
from lsq.serving.architecture import check_codes
from lsq.serving.subwords import Subwords, processor_of
from lsq.serving.translator import (
    BATCH_TOKENS,
    TextTranslator,
    TranslationModel,
    backend_of,
    check_settings,
    longest_source,
    read_exported,
    stamp_of,
)


class Translator(TextTranslator):
    """Translates text with a trained model, in any thread.

    Args:
        path: a run of `lsq train-text`, its output folder with one run, a file of `lsq export`, or
            a checkpoint.
        data: of a checkpoint: the folder of its dictionaries.
        sentencepiece_model: of a checkpoint: its subwords; without it, lines are words of its
            dictionaries.
        batch_tokens, long_lines: see `TextTranslator`.
        device: where it computes: "cpu"; "cuda", a GPU; "emulator", a GPU's kernels on the CPU, for
            tests.

    Raises:
        FileNotFoundError: there is no such file.
        MissingPackage: the file was written by fairseq, which is not installed.
        ValueError: a file is damaged, or something else; batch_tokens is below 1; there is no such
            device or value of long_lines; or the device does not work, or not for this model.
    """

    def __init__(
        self,
        path: str | PathLike,
        *,
        data: str | PathLike | None = None,
        sentencepiece_model: str | PathLike | None = None,
        batch_tokens: int = BATCH_TOKENS,
        long_lines: str = "cut",
        device: str = "cpu",
    ):
        check_settings(batch_tokens, long_lines)
        data, sentencepiece_model = (
            None if given is None else Path(given) for given in (data, sentencepiece_model)
        )
        model = load(Path(path), data, sentencepiece_model, backend_of(device))
        super().__init__(model, batch_tokens=batch_tokens, long_lines=long_lines)


def load(
    path: Path,
    data: Path | None = None,
    sentencepiece_model: Path | None = None,
    device: Backend | None = None,
) -> TranslationModel:
    """Read a model from what `Translator` takes, to compute on a backend; None: on the CPU.

    Raises:
        FileNotFoundError, MissingPackage, ValueError: see `Translator`.
    """
    device = device or backend("cpu")
    check_name(path)
    if path.is_file() and model_file.is_model_file(path):
        if data is not None or sentencepiece_model is not None:
            raise ValueError(
                f"{path} has its words in it; leave --data and --sentencepiece-model out"
            )
        return read_exported(path, device)
    for folder in (path, path.parent):
        if (folder / "model.bin").is_file() and (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} is a model of CTranslate2's, which lsq does not read; name the run, or"
                " what `lsq export --to lsq` makes of it"
            )
    return _read_trained(run_files.find(path, data, sentencepiece_model), device)


def _read_trained(files: run_files.Source, device: Backend) -> TranslationModel:
    """Read a checkpoint."""
    logs.configure()
    try:
        from lsq.commands import trained  # it imports fairseq, which takes seconds
        from lsq.fairseq.checkpoint import options_in, quantization
        from lsq.fairseq.generator import steps_of, words_of
    except ModuleNotFoundError as error:
        raise extras.MissingPackage(
            f"{files.checkpoint} needs {extras.explanation(error.name or '')}; what `lsq export"
            " --to lsq` makes of it needs none"
        ) from error

    if device is not backend("cpu"):
        try:
            check_codes(quantization(options_in(files.checkpoint, "model")))
        except ValueError as error:
            raise ValueError(
                f"{files.checkpoint} is translated on the CPU alone: {error}"
            ) from None
    stamp = stamp_of(files.checkpoint)
    found = trained.load(files)
    if found.source is None:
        raise ValueError(
            f"{files.checkpoint} is a language model; it does not translate (see `lsq generate`)"
        )
    source, target = words_of(found.source), words_of(found.target)
    return TranslationModel(
        file=files.checkpoint,
        stamp=stamp,
        steps=steps_of([found.model], device),
        subwords=Subwords(source, target, files.subwords and processor_of(files.subwords)),
        longest_source=longest_source(found.model.max_positions()[0], found.trained_length),
        options=found.search,
    )

"""`lsq export`: write a trained model for `lsq translate`, CTranslate2 or fairseq."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile, ZipFile

from lsq.commands import interruption, run_files
from lsq.commands.options import AnyPath, File, Folder, command_parser, is_part_of, replaces
from lsq.files.lock import locked_file
from lsq.serving import export_ctranslate2, model_file
from lsq.serving.architecture import check_codes
from lsq.serving.decoding_model import model_of
from lsq.serving.int4 import with_int4
from lsq.serving.model_file import ExportedModel

LSQ, CTRANSLATE2, FAIRSEQ = TARGETS = ("lsq", "ctranslate2", "fairseq")


class Options(Namespace):
    """Write a trained model for others to translate with. lsq: one file with the integers of the
    training, which `lsq translate` loads without fairseq. ctranslate2: a folder for CTranslate2,
    with the same codes and scales of weights. fairseq: a float checkpoint of fairseq's own
    transformer, for fairseq-generate."""

    to: Annotated[str, TARGETS]
    """program that is to load it"""
    output: AnyPath
    """the file, or CTranslate2's folder"""
    bits: Annotated[int, (4,), "N"] | None = None
    """bits of weights, for lsq: 4 rounds wider weights by least squares (default: as trained)"""
    overwrite: bool = False
    """replace what was exported there before"""
    data: Folder | None = None
    """folder of a checkpoint's dict.*.txt"""
    sentencepiece_model: File | None = None
    """sentencepiece model of a checkpoint"""


def parser() -> ArgumentParser:
    made = command_parser("export", Options)
    made.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run of `lsq train-text` (runs/mine/int8, or runs/mine with one run in it), a"
        " checkpoint with --data, or (for ctranslate2, or with --bits 4) a file that was exported"
        " for lsq",
    )
    return made


def run(arguments: list[str]) -> int:
    """Write the exported model; ValueError, OSError, or Interrupted by SIGTERM or SIGHUP."""
    given = parser().parse_args(arguments)
    check_output(given)
    if given.bits is not None and given.to != LSQ:
        raise ValueError(
            f"--bits {given.bits} is for files that lsq reads, not for {given.to}: leave it out"
        )
    with interruption.raised(), locked_file(given.output, "choose another --output"):
        if given.model.is_file() and model_file.is_model_file(given.model):
            export_file(given)
        else:
            export_training(given)
    size = sum(
        path.stat().st_size for path in (given.output, *given.output.glob("*")) if path.is_file()
    )
    print(f"{given.output}: {size / 1e6:.1f} MB for {given.to}")
    return 0


def check_output(given: Namespace) -> None:
    """Raise ValueError for an --output that must not be replaced."""
    output = given.output
    if not replaces(output, given.overwrite):
        return
    inputs = list(filter(None, (given.model, given.data, given.sentencepiece_model)))
    if any(is_part_of(path, [output]) for path in inputs) or is_part_of(output, inputs):
        raise ValueError(f"--output {output} is what is exported, or part of it; choose another")
    if not is_exported(output, given.to):
        raise ValueError(
            f"--output {output} is there and was not exported for {given.to}; choose another"
        )


def is_exported(path: Path, target: str) -> bool:
    """Return whether a path was exported for a target; fairseq: any file of torch.save counts."""
    if target == LSQ:
        return model_file.is_exported(path)
    if target == CTRANSLATE2:
        return export_ctranslate2.is_model_folder(path)
    try:
        with ZipFile(path) as file:
            return any(name.endswith("/data.pkl") for name in file.namelist())
    except (OSError, BadZipFile):
        return False


def export_file(given: Namespace) -> None:
    """Export from a file that was exported for lsq; ValueError if an option does not go with it."""
    if given.data is not None or given.sentencepiece_model is not None:
        raise ValueError(
            f"{given.model} has its words in it; leave --data and --sentencepiece-model out"
        )
    if given.to == FAIRSEQ or given.to == LSQ and given.bits is None:
        raise ValueError(
            f"{given.model} is exported for lsq already; for {given.to} give the run or its"
            " checkpoint"
        )
    write_codes(given, model_file.read(given.model))


def export_training(given: Namespace) -> None:
    """Export a checkpoint; ValueError if its model is not of lsq, or cannot be kept as codes."""
    source = run_files.find(given.model, given.data, given.sentencepiece_model)
    from lsq.fairseq import checkpoint, float_checkpoint  # imports fairseq, which takes seconds
    from lsq.fairseq.model import LSQModel

    quant = checkpoint.quantization(checkpoint.options_in(source.checkpoint, "model"))
    if quant.quantized or given.to != FAIRSEQ:
        check_codes(quant)
    found = run_files.load(source)
    if not isinstance(found.model, LSQModel):
        raise ValueError(
            f"{source.checkpoint} is of fairseq's own {type(found.model).__name__}; give one of"
            " lsq's"
        )
    if given.to == FAIRSEQ:
        float_checkpoint.write(
            given.output, found.model, found.options, found.languages, updates=found.updates
        )
        return
    exported = ExportedModel(
        model=model_of(found.model),
        source=found.source and tuple(found.source.symbols),
        target=tuple(found.target.symbols),
        subwords=source.subwords and source.subwords.read_bytes(),
        trained_length=found.trained_length,
        search=found.search,
    )
    write_codes(given, exported)


def write_codes(given: Namespace, exported: ExportedModel) -> None:
    """Write a model as codes, for lsq or CTranslate2."""
    if given.to == CTRANSLATE2:
        words = exported.source, exported.target
        export_ctranslate2.write(given.output, exported.model, *words, subwords=exported.subwords)
        return
    model = exported.model if given.bits is None else with_int4(exported.model)
    model_file.write(given.output, replace(exported, model=model))

"""The subcommands of `lsq`; each module has `run(arguments) -> exit status`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: its module is imported only when it is used, because fairseq takes seconds to import."""

    module: str
    help: str


COMMANDS = {
    "train": Command(module="lsq.commands.train", help="train a model: fairseq-train without its traps"),
    "generate": Command(module="lsq.commands.generate", help="translate: fairseq-generate without its traps"),
    "train-text": Command(
        module="lsq.commands.train_text", help="train, translate and score a model of your own parallel text"
    ),
    "numbers": Command(
        module="lsq.commands.numbers", help="the built-in task: English number names to German, float and int8"
    ),
    "plan": Command(module="lsq.commands.plan", help="place buffers in as little memory as possible"),
    "doctor": Command(module="lsq.commands.doctor", help="what this machine can do, and what to install for more"),
    "tune": Command(module="lsq.commands.tune", help="find the fastest way to run each matrix product on this device"),
    "configs": Command(module="lsq.commands.configs", help="files of tuned products: list, show, verify, export"),
    "user-dir": Command(module="lsq.commands.user_dir", help="print the folder for fairseq's --user-dir"),
}

"""The subcommands of `lsq`; each module has `run(arguments) -> exit status`."""

COMMANDS = {
    "train": "train a model: fairseq-train without its traps",
    "generate": "translate: fairseq-generate without its traps",
    "train-text": "train, translate and score a model of your own parallel text",
    "translate": "translate text with a trained model",
    "serve": "translate over HTTP",
    "export": "write a trained model for lsq, CTranslate2 or fairseq to translate with",
    "convert-checkpoint": "make a checkpoint of one number format into one of another",
    "compare": "train in float and in int8 from the same start, and show what int8 loses",
    "numbers": "the built-in task: English number names to German, float and int8",
    "plan": "place buffers in as little memory as possible",
    "formats": "what number formats cost the tensors of a model, as table, picture and JSON",
    "sensitivity": "what each layer costs in loss in each number format: which bits where",
    "allocate": "a number format for each weight, so that a model loses least within a budget",
    "doctor": "what this machine can do, and what to install for more",
    "tune": "find the fastest way to run matrix products on this GPU or CPU",
    "configs": "files of tuned products: list, show, verify",
    "user-dir": "print the folder for fairseq's --user-dir",
}
"""Command -> help. Its module, with _ for -, is imported late: fairseq takes seconds."""
EXTRAS = {
    "train": ("fairseq",),
    "generate": ("fairseq",),
    "train-text": ("fairseq", "text", "study"),
    "numbers": ("fairseq", "text", "study"),
    "compare": ("fairseq", "text", "study"),
    "formats": ("study",),
    "sensitivity": ("study",),
    "allocate": ("huggingface", "study"),
    "serve": ("serve",),
}
"""Command -> extras of lsq that it cannot run without."""

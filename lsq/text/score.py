"""BLEU and chrF by sacrebleu."""

from sacrebleu.metrics import BLEU, CHRF

TOKENIZERS = ("13a", "intl", "char", "zh", "none")
"""What BLEU counts as words; "char" or "zh" for text that has no spaces."""


def scores(hypotheses: list[str], references: list[str], tokenizer: str) -> dict[str, float | str]:
    """BLEU and chrF of a corpus in percent, each with sacrebleu's signature; `tokenizer` is one of
    TOKENIZERS."""
    found = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer)), ("chrf", CHRF())):
        found[name] = round(metric.corpus_score(hypotheses, [references]).score, 2)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found

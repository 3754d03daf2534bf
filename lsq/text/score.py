"""BLEU and chrF by sacrebleu."""

from sacrebleu.metrics import BLEU, CHRF

TOKENIZERS = ("13a", "intl", "char", "zh", "none")


def scores(hypotheses: list[str], references: list[str], tokenizer: str) -> dict[str, float | str]:
    """Compute BLEU and chrF of a corpus in percent, with sacrebleu's signatures."""
    results = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer)), ("chrf", CHRF())):
        results[name] = round(metric.corpus_score(hypotheses, [references]).score, 2)
        results[f"{name}_signature"] = str(metric.get_signature())
    return results

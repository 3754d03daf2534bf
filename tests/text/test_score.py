from lsq.text.score import scores

GERMAN = ["das ist ein kleiner Test .", "und das hier ist noch einer ."]


def test_perfect_and_worthless_translations():
    perfect = scores(GERMAN, GERMAN, "13a")
    assert perfect["bleu"] == perfect["chrf"] == 100
    assert "tok:13a" in perfect["bleu_signature"] and "nc:6" in perfect["chrf_signature"]
    assert scores(["q", "q"], GERMAN, "13a")["bleu"] == 0


def test_characters_as_words():
    """Single words have no four-grams of words, but of characters."""
    names, almost = ["dreihunderteins", "einhundert"], ["dreihundertzwei", "einhundert"]
    assert scores(names, names, "char")["bleu"] == 100
    assert scores(names, names, "13a")["bleu"] == 0
    assert 50 < scores(almost, names, "char")["bleu"] < 100

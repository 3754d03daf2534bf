"""Corpora, vocabularies and scores of text, for the commands; nothing here knows run folders."""

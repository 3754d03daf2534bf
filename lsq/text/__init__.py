"""Corpora, vocabularies and scores of text, for the commands; nothing here knows of run folders."""

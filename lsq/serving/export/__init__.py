"""Trained models as files that are decoded with, without fairseq: one of lsq's own, and
CTranslate2's folder."""

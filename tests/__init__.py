"""Tests of lsq."""

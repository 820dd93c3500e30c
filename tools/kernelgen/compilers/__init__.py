"""Compilers from HLO to NEFF: one module each, the common protocol (`base.Compiler`), and the choice among them (`choice`).

This file imports nothing: planning needs only `settings`.
"""

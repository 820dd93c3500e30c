"""Compilers of HLO to NEFF: one module each, one protocol between (`base.Compiler`), and the choice among them (`choice`).

Nothing is imported here: planning needs `settings` alone.
"""

"""Instructions of nki.isa, by engine. `newer` and `older` give them the signatures of the two generations.

Every function takes a destination, or None for a new tile that it returns (which the older generation does).
"""

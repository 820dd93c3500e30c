"""How the generator is called: generated files name it."""

COMMAND = "./bazelw run //tools:regenerate"

"""The command that runs the generator; generated files name it."""

COMMAND = "./bazelw run //tools:regenerate"

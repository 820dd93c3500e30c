"""`python -m kernelgen`: the command line, for when the `kernelgen` script is not installed."""

from kernelgen.cli import main

if __name__ == "__main__":
    main()

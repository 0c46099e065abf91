"""`python -m graphex`: the command line, also where graphex is not installed."""

from graphex.cli import main

if __name__ == "__main__":
    main(prog_name="graphex")

"""`python -m kdjax COMMAND`: the console script `kdjax`, where that is not on the path."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run()

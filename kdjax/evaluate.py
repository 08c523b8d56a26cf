"""`python -m kdjax.evaluate`: the command `kdjax evaluate` by its old name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("evaluate")

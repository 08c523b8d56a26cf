"""`python -m kdjax.export`: the command `kdjax export` by its old name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("export")

"""`python -m kdjax.report`: the command `kdjax report` by its old name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("report")

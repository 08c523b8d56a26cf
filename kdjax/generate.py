"""`python -m kdjax.generate`: the command `kdjax generate` by its old name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("generate")

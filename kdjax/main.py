"""`python -m kdjax.main`: the command `kdjax train` by its first name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("train")

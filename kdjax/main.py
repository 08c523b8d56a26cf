"""`python -m kdjax.main`: the command `kdjax train` by its old name."""

from kdjax.commands.train import cli

if __name__ == "__main__":
    cli()

"""`python -m kdjax.cache_teacher`: the command `kdjax cache` by its old name."""

from kdjax.commands.cli import run

if __name__ == "__main__":
    run("cache")

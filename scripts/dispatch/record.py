"""Prints dispatch.json: what a dispatched run is, from its config and flags. Used by dispatch.sh.

Refuses, with status 2, a config that cannot run.
"""

import argparse
import ast
import datetime
import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from kdjax.config import Config, validate
from kdjax.errors import UserError


def _value(text: str, old: Any) -> Any:
    if isinstance(old, str):
        return text
    if isinstance(old, bool):
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    value = ast.literal_eval(text)
    if isinstance(old, int) and not isinstance(value, int):
        raise ValueError(text)
    return type(old)(value)


def effective(flags: list[str]) -> Config:
    """The config that `kdjax.main` makes of these flags; raises `UserError` for what it refuses."""
    named = [flag.removeprefix("--").partition("=") for flag in flags]
    file, _, size = next(value for name, _, value in named if name == "config").partition(":")
    get_config = runpy.run_path(file)["get_config"]
    config = get_config(size) if size else get_config()
    for name, _, text in named:
        if not name.startswith("config."):
            continue
        *path, last = name.split(".")[1:]
        try:
            section = functools.reduce(getattr, path, config)
            setattr(section, last, _value(text, getattr(section, last)))
        except AttributeError as error:
            raise UserError(f"--{name}={text}: {error}. See kdjax/config.py.") from error
        except (KeyError, SyntaxError, ValueError):
            kind = type(getattr(section, last)).__name__
            raise UserError(f"--{name}={text}: must be of type {kind}.") from None
    validate(config)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run", "sha", "dirty", "host", "ticket", "phase"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("flags", nargs="+")
    asked = parser.parse_args()
    try:
        config = effective(asked.flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    folder = Path("runs", asked.run).absolute()
    record = {
        "ticket": asked.ticket or None,
        "phase": asked.phase or None,
        "falsifier": "F-DISTILL-SMOKE-001" if config.smoke.steps else None,
        "run_name": asked.run,
        "host": asked.host,
        "sha": asked.sha,
        "uncommitted_changes_left_behind": asked.dirty == "1",
        "config": asked.flags[0].removeprefix("--config="),
        "teacher": config.teacher.path,
        "student_init": config.student.path,
        "steps": config.train.steps,
        "smoke_steps": config.smoke.steps,
        "batch_size": config.train.batch_size,
        "learning_rate": config.optim.learning_rate,
        "kd_temperature": config.loss.temperature,
        "kd_alpha": config.loss.alpha,
        "flags": asked.flags,
        "remote_run_dir": str(folder),
        "remote_log": str(folder / "run.log"),
        "dispatched_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

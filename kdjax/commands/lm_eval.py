"""Runs EleutherAI's lm-evaluation-harness with a model that kdjax reads.

    kdjax lm_eval --model_args pretrained=model.gguf,weights=packed --tasks hellaswag --batch_size 8
    kdjax lm_eval --model_args pretrained=runs/a,dtype=float32 --tasks gsm8k --apply_chat_template
    kdjax lm_eval ls tasks

Flags are the harness's (`kdjax lm_eval run --help` lists them); `--model kdjax` is added.
`--model_args` takes pretrained (as for `kdjax generate`, without @FORM), weights (dense, packed or
float8), dtype (bfloat16 or float32), compute_dtype, tokenizer, base, max_length, max_gen_toks and
prefix_token_id. Needs `pip install 'kdjax[lm-eval]'`.
"""

# pyright: reportMissingImports=false
import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdjax.commands.parsing import Parser, log_to_terminal, started
from kdjax.errors import FINISHED, UserError, reporting

_ACTIONS = ("run", "ls", "validate")


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in ([], ["-h"], ["--help"]):
        Parser("lm_eval", __doc__).parse_args(["--help"])
    cli, registry, logs = _import_harness()
    if "kdjax" not in registry:
        registry.register("kdjax", target="kdjax.evaluation.harness:KdjaxLM")
    action, *flags = argv if argv[0] in _ACTIONS else ["run", *argv]
    if action == "run" and not any(flag.partition("=")[0] in ("--model", "-M") for flag in flags):
        flags = ["--model", "kdjax", *flags]
    log_to_terminal()
    logs()
    with _arguments("kdjax lm_eval", action, *flags):
        harness = cli()
        options = harness.parse_args()
    with started():
        try:
            harness.execute(options)
        except ValueError as error:
            raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            refused = raised.parent.parts[-2:] == ("lm_eval", "config")  # a task, a flag's value
            if not refused and raised.parts[-2:] != ("lm_eval", "evaluator.py"):  # no task
                raise  # a fault
            raise UserError(
                f"lm_eval: {str(error).rstrip('.')}. `kdjax lm_eval ls tasks` lists them."
            ) from error
    return FINISHED


def _import_harness() -> tuple[Any, Any, Any]:
    """The harness's command line, its registry of models, and what sets up its log."""
    try:
        import lm_eval.models  # noqa: F401  # else it registers its own only while it knows none
        from lm_eval._cli import HarnessCLI
        from lm_eval.api.registry import model_registry
        from lm_eval.utils import setup_logging
    except ImportError as error:
        raise UserError(
            f"kdjax lm_eval needs lm-evaluation-harness ({error}): pip install 'kdjax[lm-eval]'."
        ) from error
    return HarnessCLI, model_registry, setup_logging


@contextlib.contextmanager
def _arguments(*argv: str) -> Iterator[None]:
    """Lets the harness, which reads `sys.argv` alone, read these."""
    held, sys.argv = sys.argv, list(argv)
    try:
        yield
    finally:
        sys.argv = held

"""Judges the answers that `kdjax evaluate --json` kept once more, by other tests of the problems.

    python -m scripts.checks.judge_again judged.json --humaneval=HumanEvalPlus.jsonl.gz \\
        --json=plus.json [--allow-unsandboxed]

No model answers anew: an answer is to the prompt that it was written for, its program gets the
tests of the file that is named here, such as HumanEval+'s hundreds of inputs a problem. All
wordings and samples of a benchmark are judged; the JSON has the same form, so that
`scripts.checks.compare_passk` pairs two of them. Exit status: 0 done, 2 bad input.
"""

import argparse
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax.device import cluster
from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk, problems, sandbox, table
from kdjax.formats.files import check_place
from kdjax.models.decoding import Completion
from scripts.checks import compare_passk


def judge_again(
    figures: Mapping[str, Any], asked: Sequence[problems.Problem], settings: passk.Settings
) -> dict[str, Any]:
    """The figures of a benchmark with its answers judged by the tests of `asked`.

    Raises `UserError` if the answers are to other problems.
    """
    by_task = {problem.task: problem for problem in asked}
    kept = figures["results"]
    if other := {of["task"] for of in kept} ^ by_task.keys():
        raise UserError(
            f"found answers to {figures['problems']} problems and tests of {len(by_task)} "
            f"problems, of which {min(other)} is in one alone; expected the same. Name a file of "
            "the problems that were asked."
        )

    def judge(of: Mapping[str, str]) -> passk.Sample:
        failed = of["reason"] == passk.INFERENCE_FAILED
        answer = of["error"] if failed else Completion([], of["answer"], of["ended"], [])
        return passk.judge((by_task[of["task"]], answer), settings)

    with concurrent.futures.ThreadPoolExecutor(cluster.cores()) as pool:
        samples = list(pool.map(judge, kept))
    return passk.summarise(asked, samples, settings)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("judged", type=Path, help="JSON of `kdjax evaluate` or `scripts.checks.llama_answers`")
    add("--humaneval", type=Path, metavar="FILE", help="problems in HumanEval's form")
    add("--mbpp", type=Path, metavar="FILE", help="problems in MBPP's form")
    add("--json", type=Path, required=True, help="where the figures and answers go")
    add("--allow-unsandboxed", action="store_true", help="see `kdjax evaluate`")
    args = parser.parse_args(argv)
    sandbox.check(args.allow_unsandboxed)
    found = compare_passk.read(args.judged)
    if args.json.resolve() == args.judged.resolve():
        raise UserError(f"{args.json} holds the answers; expected another file. Name one.")
    check_place(args.json)
    tests = {
        name: load(path)
        for name, load in problems.BENCHMARKS.items()
        if (path := getattr(args, name)) is not None
    }
    if not tests:
        raise UserError("found neither --humaneval nor --mbpp; expected one. Name the tests.")
    by_name = {name: [of for of in found if of.partition(" ")[0] == name] for name in tests}
    if lacking := [name for name, ways in by_name.items() if not ways]:
        raise UserError(
            f"{args.judged}: found no answers to the problems of --{lacking[0]}; expected some. "
            "Leave it out."
        )
    document: dict[str, Any] = {"target": str(args.judged), "broken": []}
    for name, asked in tests.items():
        for of in by_name[name]:
            figures = found[of]
            settings = passk.Settings(
                wording=figures["wording"],
                samples=figures["samples"] // figures["problems"],
                ks=tuple(map(int, figures["pass_at_k"])),
                allow_unsandboxed=args.allow_unsandboxed,
            )
            document[of] = judge_again(figures, asked, settings)
            print("\n".join(table.describe_benchmark(of, document[of])), flush=True)
    table.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The reference's contract schema: keys, their other spellings, and the words a value may be.

Keys that are in no table here are tolerated, as the reference's reader tolerates them; near misses
of a top-level key are not.
"""

import re
from collections.abc import Mapping
from typing import Any

KERNEL = "kernel"
KINDS = (
    KERNEL, "registry", "model-family", "model-family-variant", "tokenizer", "training-loop",
    "pretraining-corpus", "training-precondition-gate", "corpus-assembly", "pattern", "schema",
    "beat-benchmark", "kaizen",
)  # fmt: skip
TOP_LEVEL = (
    "metadata", "equations", "proof_obligations", "kernel_structure", "simd_dispatch",
    "enforcement", "falsification_tests", "kani_harnesses", "qa_gate", "verification_summary",
    "type_invariants", "coq_spec", "beat", "stories",
)  # fmt: skip
OBLIGATION_TYPES = (
    "invariant", "equivalence", "bound", "monotonicity", "idempotency", "linearity", "symmetry",
    "associativity", "conservation", "ordering", "completeness", "soundness", "involution",
    "determinism", "roundtrip", "state_machine", "classification", "independence", "termination",
    "safety", "liveness", "precondition", "postcondition", "frame", "loop_invariant",
    "loop_variant", "old_state", "subcontract",
)  # fmt: skip
NOT_APPLICABLE = "not_applicable"
WORDS = {
    ("metadata", "kind"): KINDS,
    ("metadata", "enforcement_level"): ("basic", "standard", "strict", "proven"),
    ("proof_obligations", "type"): OBLIGATION_TYPES,
    ("proof_obligations", "applies_to"): (
        "all", "scalar", "simd", "converter", "other", NOT_APPLICABLE),
    ("kani_harnesses", "strategy"): ("exhaustive", "stub_float", "compositional", "bounded_int"),
}  # fmt: skip
# The name used here, then the other spelling that the reader takes.
_ALIASES = {
    "property": "statement",
    "formal": "verification",
    "rule": "description",
    "prediction": "expected",
    "test": "command",
    "if_fails": "fails_if",
}


def get(item: Mapping[str, Any], key: str) -> Any:
    """The value under a key or its other spelling; None if neither is there."""
    value = item.get(key)
    return item.get(_ALIASES[key]) if value is None and key in _ALIASES else value


def filled(item: Mapping[str, Any], key: str) -> bool:
    """Whether there is more than blanks under a key or its other spelling."""
    value = get(item, key)
    return value is not None and bool(str(value).strip())


def near_miss(key: str) -> str | None:
    """The top-level key that was meant: another case, separator or number; None if none was."""
    if key in TOP_LEVEL:
        return None
    return next((name for name in TOP_LEVEL if _bare(name) == _bare(key)), None)


def _bare(key: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", key.lower())
    return re.sub(r"(ies|y)$", "i", bare) if bare.endswith(("ies", "y")) else bare.rstrip("s")

"""A model file as commands name it: PATH[@BACKEND[:DTYPE]], how it is kept and computed in.

BACKEND is `dequant` (the default), `q4k`, `fp8` or `fp8_precise`; DTYPE `bfloat16` (the default) or
`float32`.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.formats import TensorTable, open_table
from kdjax.models.arch import ArchSpec, spec_from_table
from kdjax.models.decoder import Compute
from kdjax.models.model import PROVIDERS, TeacherLogitsProvider
from kdjax.models.tokenizer import Tokenizer, load_tokenizer

_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Form:
    """A model file, how its weights are kept, and what they are computed in."""

    path: str
    backend: str = "dequant"
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> "Form":
        """From PATH[@BACKEND[:DTYPE]]; a path may hold an @ if a form follows it."""
        path, at, how = text.rpartition("@")
        if not at or "/" in how:
            return cls(text)
        backend, _, dtype = how.partition(":")
        if backend not in PROVIDERS or (dtype or _DTYPES[0]) not in _DTYPES:
            raise UserError(
                f"{text!r}: found the form {how!r}; expected {' or '.join(PROVIDERS)}, then "
                f"nothing or : and {' or '.join(_DTYPES)}, such as {path}@q4k:bfloat16."
            )
        return cls(path, backend, dtype or _DTYPES[0])

    def __str__(self) -> str:
        return f"{Path(self.path).name}@{self.backend}:{self.dtype}"


class OpenForm(NamedTuple):
    """A form whose file's header was read."""

    form: Form
    table: TensorTable
    spec: ArchSpec
    tokenizer: Tokenizer

    def provider(self, mesh: Mesh, max_segments: int = 1) -> TeacherLogitsProvider:
        """Loads the weights onto the mesh."""
        dtype = jnp.dtype(self.form.dtype)
        compute = Compute(
            dtype=dtype, param_dtype=dtype, max_segments=max_segments, placement=Placement.on(mesh)
        )
        return PROVIDERS[self.form.backend](self.table, self.spec, compute, mesh)


def open_form(text: str) -> OpenForm:
    """Opens the file of PATH[@BACKEND[:DTYPE]]; raises `UserError` for what cannot be read."""
    form = Form.parse(text)
    table = open_table(form.path)
    return OpenForm(form, table, spec_from_table(table), load_tokenizer(form.path))


def precision(*opened: OpenForm) -> Any:
    """Context in which float32 forms multiply in float32: a GPU would use TF32, 10 bits."""
    exact = any(o.form.dtype == "float32" for o in opened)
    return jax.default_matmul_precision("highest" if exact else "default")

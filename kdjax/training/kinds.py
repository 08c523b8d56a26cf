"""The one place where the words of `teacher` become kinds of teachers."""

from kdjax.config import TeacherConfig
from kdjax.data.teacher_cache import read_index, split_caches
from kdjax.errors import UserError
from kdjax.training.mixtures import Teachers
from kdjax.training.teachers import (
    RUNNING,
    CachedHidden,
    CachedTopK,
    Dense,
    NoTeacher,
    Packed,
    TeacherKind,
)


def ask_kinds(teacher: TeacherConfig) -> tuple[TeacherKind, ...]:
    """Lists the kinds that the config allows, fastest first: one, or with weights "auto" two.

    Raises `UserError` for settings that contradict each other.
    """
    weights = teacher.weights
    if not teacher.path and not teacher.cache:
        return (NoTeacher(),)
    if teacher.cache:
        caches = split_caches(teacher.cache)
        specs = [read_index(folder)[0] for _, folder in caches]
        if len(specs) > 1:
            if teacher.path or any(spec.kind != CachedTopK.name for spec in specs):
                raise UserError(
                    f"found teacher.cache={teacher.cache} of {len(specs)} caches and "
                    f"teacher.path={teacher.path!r}; expected caches of top-k ids "
                    "(kdjax cache --kind=topk) and teacher.path=''."
                )
            kinds = tuple(CachedTopK(spec.k) for spec in specs)
            return (Teachers(kinds, tuple(weight for weight, _ in caches)),)
        (spec,) = specs
        if spec.kind == CachedTopK.name:
            return (CachedTopK(spec.k),)
        if not teacher.path:
            raise UserError(
                f"found teacher.path='' and teacher.cache={teacher.cache} of hidden states; "
                "expected the model that wrote it, whose head computes logits from them."
            )
        return (CachedHidden(),)
    return (Dense(), Packed()) if weights == "auto" else (RUNNING[weights],)

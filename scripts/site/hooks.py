"""MkDocs: the site has README.md, docs/, and each file of the repository that one of them links.

Every file keeps its path in the repository, so that a link works on the site as it does in a clone,
and MkDocs finds the dead ones. A file that is no Markdown is copied as it is.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^ *```.*?^ *```|`[^`]*`", flags=re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s#:]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the theme's own files, and those of the repository in place of those of docs/."""
    own = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(_find_linked([ROOT / "README.md", *Path(config.docs_dir).rglob("[!.]*.*")]))
    where = (str(ROOT), config.site_dir, config.use_directory_urls)
    return Files([*own, *(File(str(path.relative_to(ROOT)), *where) for path in paths)])


def _find_linked(paths: list[Path]) -> set[Path]:
    """Returns these files and those that they link, directly or by another."""
    found = set()
    while paths:
        path = paths.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        if path.suffix == ".md":
            links = _LINK.findall(_CODE.sub("", path.read_text()))
            paths += [(path.parent / link).resolve() for link in links]
    return {path for path in found if path.is_relative_to(ROOT)}

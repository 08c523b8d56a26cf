"""Files of the Hugging Face Hub: `hf:` paths become files of its cache before anything is opened.

    hf:ORG/REPO/FILE             a file of a model repository, such as a GGUF
    hf:ORG/REPO                  its Transformers folder: config, weights, tokenizer
    hf:datasets/ORG/REPO[/FILES] Parquet and JSON lines; FILES is a file, a folder or a glob

`@REVISION` may follow: a branch, a tag or a commit. `huggingface_hub` has the cache, the token and
the connection. It resumes a download within one process only (2.4 deletes the part that it has when
it fails), so `_download` keeps that part beside its blob and goes on from there at the next start.
"""

import contextlib
import copy
import dataclasses
import errno
import fnmatch
import glob
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.config import Config
from kdjax.errors import MissingFileError, UserError, WriteError, suggest

_log = logging.getLogger("kdjax")

PREFIX = "hf:"
LOCAL = Path("models")  # a file of the same name here is used first
HEADER = 32 << 20  # bytes that hold the header of a model's file; of a Qwen2.5 GGUF it is 6 MB
_NAME = r"[\w.-]+"
_PATH = re.compile(rf"hf:(datasets/)?({_NAME}/{_NAME})(?:/([^@]+))?(?:@(.+))?")
_CACHED = re.compile(rf"(model|dataset)s--({_NAME})/snapshots/([0-9a-f]{{40}})(?:/(.+))?$")
_SHARD = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")

# What is taken of a Transformers folder, and of a data set.
TOKENIZER = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
MODEL = (*TOKENIZER, "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TEXT = ("*.parquet", "*.jsonl")


class HubPath(NamedTuple):
    """An `hf:` path, taken apart."""

    text: str
    repository: str  # ORG/REPO
    file: str  # within the repository; "" is the whole of it
    revision: str  # "" is the default branch
    kind: str  # "model" or "dataset"

    @classmethod
    def parse(cls, text: str, wanted: tuple[str, ...]) -> "HubPath":
        """Raises `UserError` for another form, and for a data set in a model's place."""
        match = _PATH.fullmatch(text)
        expected = "hf:datasets/ORG/REPO[/FILES]" if wanted is TEXT else "hf:ORG/REPO[/FILE]"
        if not match or bool(match[1]) != (wanted is TEXT):
            raise UserError(f"{text}: expected {expected}, then nothing or @REVISION.")
        kind = "dataset" if match[1] else "model"
        return cls(text, match[2], (match[3] or "").strip("/"), match[4] or "", kind)

    def find_local(self) -> Path | None:
        """The file or folder of the same name in `models`, unless a revision was asked for."""
        local = LOCAL / Path(self.file or self.repository).name
        return local if self.kind == "model" and not self.revision and local.exists() else None

    def patterns(self, wanted: tuple[str, ...], folder: bool) -> list[str]:
        """What to take of the repository's files; `folder` says that `file` is one."""
        if not self.file or folder:
            prefix = f"{self.file}/" if self.file else ""
            return [prefix + name for name in wanted]
        if wanted is TEXT or self.file.endswith(".gguf"):
            return [_SHARD.sub(r"-*\1", self.file)]
        beside = self.file.rpartition("/")[0]
        return [self.file, *(f"{beside}/{name}".lstrip("/") for name in TOKENIZER)]


@dataclasses.dataclass(frozen=True)
class _File:
    """A file to download."""

    path: HubPath
    name: str
    commit: str
    size: int
    sha256: str  # "" for a small file that is not in LFS
    wanted: int  # bytes from its beginning: all of them, or its header

    @property
    def blob(self) -> Path:
        """Where the cache keeps its bytes."""
        return _storage(self.path) / "blobs" / self.sha256

    @property
    def part(self) -> Path:
        """What has arrived of them."""
        return self.blob.with_name(f"{self.sha256}.incomplete")

    def missing(self) -> int:
        """Bytes still to come."""
        if self.sha256 and self.blob.exists():
            return 0
        arrived = self.part.stat().st_size if self.sha256 and self.part.exists() else 0
        return max(0, self.wanted - arrived)

    def here(self) -> Path:
        """The blob, or its beginning."""
        return self.blob if self.blob.exists() else self.part


@dataclasses.dataclass(frozen=True)
class _Listing:
    """What a path stands for: names in a snapshot folder of the cache, some still to download."""

    path: HubPath
    names: list[str]
    snapshot: Path
    missing: list[_File]

    def local(self) -> str:
        """The file or folder of a model; of text its files, as globs joined by commas."""
        if self.path.kind == "model":
            return str(self.snapshot / self.path.file)
        return ",".join(glob.escape(str(self.snapshot / name)) for name in self.names)


def fetch_files(config: Config, *, headers: Path | None = None) -> Config:
    """A copy of the config with every `hf:` path replaced by files, downloaded if need be.

    All repositories are asked before the first byte is downloaded. For a plan `headers` is an empty
    folder, where models that are not in the cache appear as far as their headers, and the text is
    left alone. Raises `MissingFileError` for what the Hub does not give and `WriteError` for what
    the disk does not take; both say what to do.
    """
    config = copy.deepcopy(config)
    student = TOKENIZER if config.student.init == "random" else MODEL
    fields: list[tuple[object, str, tuple[str, ...]]] = [
        (config.teacher, "path", MODEL),
        (config.student, "path", student),
        (config.data, "tokenizer", TOKENIZER),
    ]
    if headers is None:
        fields += [(config.data, "train", TEXT), (config.data, "heldout", TEXT)]
    paths: dict[str, tuple[str, ...]] = {}
    for section, name, wanted in fields:
        for part in map(str.strip, getattr(section, name).split(",")):
            if part.startswith(PREFIX):
                paths.setdefault(part, wanted)
    files = _fetch(paths, headers)
    for section, name, _ in fields:
        parts: list[str] = [part.strip() for part in getattr(section, name).split(",")]
        if not files.keys().isdisjoint(parts):
            setattr(section, name, ",".join(files.get(part, part) for part in parts))
    return config


def fetch_path(path: str | os.PathLike[str], wanted: tuple[str, ...] = MODEL) -> str:
    """The file or folder that the path stands for; another path than an `hf:` one stays as it is.

    Of `TEXT` globs of a data set's files, joined by commas.
    Raises `MissingFileError` for what the Hub does not give.
    """
    path = os.fspath(path)
    return _fetch({path: wanted})[path] if path.startswith(PREFIX) else path


def origin(path: str | os.PathLike[str]) -> str | None:
    """The `hf:` path, at its commit, of a file or folder in the Hub's cache; None for others."""
    match = _CACHED.search(os.fspath(path))
    if not match:
        return None
    kind, repository, commit, file = match.groups()
    name = repository.replace("--", "/") + (f"/{file}" if file else "")
    return f"hf:{'datasets/' if kind == 'dataset' else ''}{name}@{commit}"


def _fetch(paths: dict[str, tuple[str, ...]], headers: Path | None = None) -> dict[str, str]:
    """The local path of each, or globs joined by commas for text; see `fetch_files`."""
    listings, local, problems = [], dict[str, str](), list[str]()
    for text, wanted in paths.items():
        path = HubPath.parse(text, wanted)
        if found := path.find_local():
            _log.info("%s is used for %s", found, text)
            local[text] = str(found)
            continue
        try:
            listings.append(_look_up(path, wanted, HEADER if headers else None))
        except MissingFileError as error:
            problems.append(str(error))
    if problems:
        raise MissingFileError("\n".join(problems))
    _download(listings)
    for listing in listings:
        listing = _link_parts(listing, headers) if headers else _link(listing)
        local[listing.path.text] = listing.local()
        _log.info("%s: commit %s", listing.path.text, listing.snapshot.name)
    return local


# --- what there is ------------------------------------------------------------------------------


def _look_up(path: HubPath, wanted: tuple[str, ...], most: int | None = None) -> _Listing:
    """Asks the Hub which files a path stands for, or the cache where the Hub does not answer.

    At most `most` bytes of each are wanted; None: all.
    """
    from huggingface_hub import HfApi

    try:
        with _explaining(path):
            api = HfApi()
            info: Any = api.repo_info(
                path.repository,
                repo_type=path.kind,
                revision=path.revision or None,
                files_metadata=True,
            )
    except _UnreachableError as error:
        return _look_in_cache(path, wanted, error)
    files = {file.rfilename: file for file in info.siblings or []}
    folder = any(name.startswith(f"{path.file}/") for name in files)
    names = _select(path, files, path.patterns(wanted, folder))
    commit = str(info.sha)
    snapshot = _storage(path) / "snapshots" / commit
    missing = [
        _File(
            path,
            name,
            commit,
            size=files[name].size or 0,
            sha256=files[name].lfs.sha256 if files[name].lfs else "",
            wanted=min(files[name].size or 0, most or sys.maxsize),
        )
        for name in names
        if not (snapshot / name).exists()
    ]
    if missing and info.gated:
        with _explaining(path):
            api.auth_check(path.repository, repo_type=path.kind)
    return _Listing(path, names, snapshot, missing)


def _look_in_cache(path: HubPath, wanted: tuple[str, ...], error: "_UnreachableError") -> _Listing:
    """The same of what was downloaded before; raises `error` if that is not all of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    storage, revision = _storage(path), path.revision or "main"
    ref = storage / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    snapshot = storage / "snapshots" / commit
    patterns = path.patterns(wanted, (snapshot / path.file).is_dir())
    try:
        snapshot_download(
            path.repository,
            repo_type=path.kind,
            revision=revision,
            allow_patterns=patterns,
            local_files_only=True,
        )
        cached = (file for file in sorted(snapshot.rglob("*")) if file.is_file())
        names = _select(path, [file.relative_to(snapshot).as_posix() for file in cached], patterns)
    except (LocalEntryNotFoundError, MissingFileError):
        raise error from None
    _log.info("%s: the Hub does not answer; what the cache has is used", path.text)
    return _Listing(path, names, snapshot, [])


def _select(path: HubPath, files: Iterable[str], patterns: list[str]) -> list[str]:
    """The names that match, in order; raises `MissingFileError` if what was asked for is not there.

    A Transformers folder without weights is not, nor a file beside which others are taken.
    """
    files = list(files)
    names = sorted(name for name in files if any(fnmatch.fnmatchcase(name, p) for p in patterns))
    needed = [p for p in patterns if p == path.file or p.endswith("model*.safetensors")]
    absent = [p for p in needed if not fnmatch.filter(names, p)]
    if names and not absent:
        return names
    ggufs = [name for name in files if name.endswith(".gguf")]
    if path.kind == "model" and ggufs and not path.file:
        raise MissingFileError(
            f"{path.text}: found GGUF files and no Transformers folder; name one of them, as "
            f"hf:{path.repository}/FILE: {_shorten(ggufs)}."
        )
    raise MissingFileError(
        f"{path.text}: found no {', '.join(absent or patterns)} in {path.repository}."
        f"{suggest(path.file, files)} It holds {_shorten(files) or 'nothing'}."
    )


def _shorten(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def _storage(path: HubPath) -> Path:
    """The repository's folder in the cache: https://huggingface.co/docs/huggingface_hub."""
    from huggingface_hub import constants

    name = f"{path.kind}s--{path.repository.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name


# --- downloads ----------------------------------------------------------------------------------


def _download(listings: list[_Listing]) -> None:
    """Brings the large files that are missing into the cache; says first how much that is.

    Raises `WriteError` if the disk has no room for all of them, before the first byte.
    """
    missing = [file for listing in listings for file in listing.missing]
    if not missing:
        return
    names = ", ".join(dict.fromkeys(file.path.text for file in missing))
    rest, total = sum(file.missing() for file in missing), sum(file.size for file in missing)
    cache = _storage(missing[0].path).parent
    _log.info("%s: %s to download, of %s, to %s", names, _show(rest), _show(total), cache)
    if rest > _free(cache):
        raise WriteError(_no_room(names, f"{_show(rest)} to download", cache))
    for file in missing:
        if file.sha256:
            with _explaining(file.path):
                _download_file(file)


def _download_file(file: _File) -> None:
    """Downloads what is wanted of a blob, from where an earlier start was cut.

    Compares the SHA-256 of a whole one.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if file.wanted > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # of 50 GB: comes by hf_xet alone, in `_link`
    storage = _storage(file.path)
    lock = storage.parent / ".locks" / storage.name / f"{file.sha256}.lock"
    for folder in (lock.parent, file.blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    repository, kind, commit = file.path.repository, file.path.kind, file.commit
    with WeakFileLock(lock):
        if file.blob.exists():  # another process was first
            return
        headers = build_hf_headers()
        if file.wanted < file.size:
            headers["Range"] = f"bytes=0-{file.wanted - 1}"
        with file.part.open("ab") as part:
            if part.tell() > file.size:
                part.truncate(0)
            if file.wanted < file.size and part.tell() >= file.wanted:
                return
            if part.tell():
                _log.info("%s: goes on from %s", file.name, _show(part.tell()))
            http_get(
                hf_hub_url(repository, file.name, repo_type=kind, revision=commit),
                part,
                resume_size=part.tell(),
                headers=headers,
                expected_size=file.wanted,
                displayed_filename=file.name,
            )
        if file.wanted < file.size:
            return
        with file.part.open("rb") as part:
            sha256 = hashlib.file_digest(part, "sha256").hexdigest()
        if sha256 != file.sha256:
            file.part.unlink()
            raise MissingFileError(
                f"{file.path.text}: found SHA-256 {sha256} in {file.name} as it arrived; expected "
                f"{file.sha256}. It was deleted: start again."
            )
        file.part.replace(file.blob)


def _link(listing: _Listing) -> _Listing:
    """Has the cache name its blobs after the repository's files, and fetches the small ones."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        """No bar: what takes long had one."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})

    if not listing.missing:
        return listing
    path = listing.path
    with _explaining(path):
        folder = snapshot_download(
            path.repository,
            repo_type=path.kind,
            revision=path.revision or None,  # which the cache then knows without the Hub
            allow_patterns=[glob.escape(name) for name in listing.names],
            tqdm_class=Silent,
        )
    return dataclasses.replace(listing, snapshot=Path(folder))


def _link_parts(listing: _Listing, folder: Path) -> _Listing:
    """As `_link`, in `folder`, with links to what the cache has of each file."""
    from huggingface_hub import hf_hub_download

    if not listing.missing:
        return listing
    path, missing = listing.path, {file.name: file for file in listing.missing}
    snapshot = folder / path.repository.replace("/", "--") / listing.snapshot.name
    for name in listing.names:
        source = listing.snapshot / name
        if name in missing and missing[name].sha256:
            source = missing[name].here()
        elif name in missing:
            with _explaining(path):
                revision, kind = missing[name].commit, path.kind
                source = hf_hub_download(path.repository, name, repo_type=kind, revision=revision)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return dataclasses.replace(listing, snapshot=snapshot)


def _free(folder: Path) -> int:
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def _show(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


# --- what goes wrong ----------------------------------------------------------------------------


class _UnreachableError(MissingFileError):
    """The Hub does not answer; its cache may have the file."""


def _no_room(name: str, found: str, cache: Path) -> str:
    return (
        f"{name}: found {found} and {_show(_free(cache))} free in {cache}; expected room for it. "
        "Free some, or set HF_HOME to a folder of another disk. What has arrived is kept: the same "
        "command goes on from there."
    )


@contextlib.contextmanager
def _explaining(path: HubPath) -> Iterator[None]:
    """What huggingface_hub raises becomes a `UserError` that says what to do."""
    from huggingface_hub import constants, errors, get_token

    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{path.repository}"
    token = "the token that was found" if get_token() else "no token"
    login = "`hf auth login`, or the variable HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        raise MissingFileError(
            f"{path.text}: {path.repository} is gated, and {token} opens it. Ask for access at "
            f"{page}, then give a token of that account: {login}."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MissingFileError(
            f"{path.text}: {hub} has no {path.kind} {path.repository}, or it is private and "
            f"{token} opens it. Check the name; for a private one give a token: {login}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise MissingFileError(
            f"{path.text}: {path.repository} has no revision {path.revision}; expected a branch, a "
            "tag or a commit of it after the last @."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == 429:
            raise _UnreachableError(_unreachable(path, error)) from error
        raise MissingFileError(f"{path.text}: {hub} refuses it ({error}). Try {login}.") from error
    except errors.HTTPError as error:  # pyright: ignore[reportPrivateImportUsage]  # httpx's
        raise _UnreachableError(_unreachable(path, error)) from error
    except UserError:
        raise
    except OSError as error:
        cache = _storage(path).parent
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WriteError(_no_room(path.text, "a full disk", cache)) from error
        if refused := WriteError.of(cache, error):
            raise refused from error
        if error.errno is not None:
            raise
        raise _UnreachableError(_unreachable(path, error.__cause__ or error)) from error
    except ValueError as error:
        raise _UnreachableError(_unreachable(path, error)) from error


def _unreachable(path: HubPath, error: BaseException) -> str:
    from huggingface_hub import constants

    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    name = LOCAL / Path(path.file or path.repository).name
    local = f"put it at {name}, or " if path.kind == "model" and not path.revision else ""
    return (
        f"{path.text}: {constants.ENDPOINT} does not answer as the Hub does ({cause}), and the "
        "cache has not all of it. What has arrived is kept: with a network, the same command goes "
        f"on from there. Without one, {local}set the field to files of yours."
    )

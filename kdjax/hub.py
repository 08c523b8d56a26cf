"""Files of the Hugging Face Hub: replaces `hf:` paths by files of its cache.

    hf:ORG/REPO/FILE             a file of a model repository, such as a GGUF
    hf:ORG/REPO                  its Transformers folder: config, weights, tokenizer
    hf:datasets/ORG/REPO[/FILES] files of records; FILES is a file, a folder or a glob

`@REVISION` may follow: a branch, a tag or a commit. `huggingface_hub` does the cache, the token,
the connection and the downloads. Headers of models can be read alone, by range: a plan reads no
more, and a run reads them before it downloads the rest.
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
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.config import Config
from kdjax.errors import MissingFileError, UserError, WriteError, suggest

_log = logging.getLogger("kdjax")

PREFIX = "hf:"
LOCAL = Path("models")  # a file of the same name here is used first
HEADER = 32 << 20  # bytes that hold the header of a model's file; of a Qwen2.5 GGUF it is 6 MB
HEADERS = Path("~/.cache/kdjax/headers")  # the headers read so far
_NAME = r"[\w.-]+"
_PATH = re.compile(rf"hf:(datasets/)?({_NAME}/{_NAME})(?:/([^@]+))?(?:@(.+))?")
_CACHED = re.compile(rf"(model|dataset)s--({_NAME})/snapshots/([0-9a-f]{{40}})(?:/(.+))?$")
_SHARD = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")

# Files that are taken of a Transformers folder, and of a data set.
TOKENIZER = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
)
MODEL = (
    *TOKENIZER,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "configuration_*.py",  # of `auto_map`; never run here
    "modeling_*.py",
)
# Files of records: the first that a data set has any of are read. Each may be packed.
_TABLES = ("parquet", "jsonl", "ndjson", "arrow"), ("json", "csv", "tsv")
TEXT = tuple(f"*.{form}{end}" for row in _TABLES for form in row for end in ("", ".gz", ".zst"))
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
# Words of names that say which split of a data set a file is of, as `datasets` reads them.
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation", "heldout"),
    "validation": ("validation", "valid", "val", "dev"),
}


def choose_tables(names: Iterable[str]) -> list[str]:
    """Chooses the files of a data set that are read: records, of the split `train` if it has one.

    `names` are paths within its folder.
    """
    names = [name for name in names if name.rpartition("/")[2] not in _DESCRIPTIONS]
    for forms in _TABLES:
        ends = tuple(f".{form}{end}" for form in forms for end in ("", ".gz", ".zst"))
        if tables := [name for name in names if name.lower().endswith(ends)]:
            return choose_split(tables)
    return []


def choose_split(names: Sequence[str]) -> list[str]:
    """Leaves out files of other splits if a name says that it is of `train`."""
    splits = [_find_split(name) for name in names]
    if "train" not in splits:
        return list(names)
    return [name for name, split in zip(names, splits, strict=True) if split in ("train", "")]


def _find_split(name: str) -> str:
    """The split that a path's last part with such a word names; empty if none does."""
    for part in reversed(name.lower().split("/")):
        for word in re.split(r"[^a-z0-9]+", part):
            for split, words in _SPLITS.items():
                if word in words:
                    return split
    return ""


class HubPath(NamedTuple):
    """An `hf:` path, taken apart."""

    text: str
    repository: str  # ORG/REPO
    file: str  # within the repository; "" is all of it
    revision: str  # "" is the default branch
    kind: str  # "model" or "dataset"

    @classmethod
    def parse(cls, text: str, wanted: tuple[str, ...]) -> "HubPath":
        """Parses a path; raises `UserError` for another form, and for a data set as a model."""
        match = _PATH.fullmatch(text)
        expected = "hf:datasets/ORG/REPO[/FILES]" if wanted is TEXT else "hf:ORG/REPO[/FILE]"
        if not match or bool(match[1]) != (wanted is TEXT):
            raise UserError(f"{text}: expected {expected}, then nothing or @REVISION.")
        strange = [p for p in match[2].split("/") if p != p.strip(".-") or "--" in p or ".." in p]
        if strange or {".", ".."} & set((match[3] or "").split("/")):
            raise UserError(f"{text}: found no name of the Hub's; expected {expected}.")
        kind = "dataset" if match[1] else "model"
        return cls(text, match[2], (match[3] or "").strip("/"), match[4] or "", kind)

    def find_local(self) -> Path | None:
        """The file or folder of the same name in `models`, unless a revision is named."""
        local = LOCAL / Path(self.file or self.repository).name
        return local if self.kind == "model" and not self.revision and local.exists() else None

    def patterns(self, wanted: tuple[str, ...], folder: bool) -> list[str]:
        """Patterns of the repository's files to take; `folder` says that `file` is a folder."""
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

    @property
    def rest(self) -> int:
        """Bytes to download: 0 if the cache has the file from another commit."""
        blob = _storage(self.path) / "blobs" / self.sha256
        return 0 if self.sha256 and blob.exists() else self.size

    @property
    def large(self) -> bool:
        """Whether more than a header is left to download."""
        return bool(self.sha256) and self.rest > HEADER

    @property
    def header(self) -> Path:
        """Path of its stored first `HEADER` bytes."""
        return HEADERS.expanduser() / f"{self.sha256}-{HEADER}"


@dataclasses.dataclass(frozen=True)
class _Listing:
    """Files of a path: names in a snapshot folder of the cache; some are still to download."""

    path: HubPath
    names: list[str]
    snapshot: Path
    missing: list[_File]

    @property
    def incomplete(self) -> bool:
        """Whether it is a model of which more than headers is left to download."""
        return self.path.kind == "model" and any(file.large for file in self.missing)

    def local(self) -> str:
        """The file or folder of a model; for text its files, as globs joined by commas."""
        if self.path.kind == "model":
            return str(self.snapshot / self.path.file)
        return ",".join(glob.escape(str(self.snapshot / name)) for name in self.names)


def fetch_files(config: Config, *, check: Callable[[Config], object] | None = None) -> Config:
    """Copies the config with every `hf:` path replaced by files, downloaded if necessary.

    All repositories are looked up before the first byte is downloaded. If models are missing, only
    their headers are read first and `check` is called with them; if it raises, nothing is
    downloaded. Raises `MissingFileError` for files that the Hub does not have and `WriteError` for
    a full disk.
    """
    local, listings = _look_up_all(_name_paths(config) | _name_text(config))
    _check_room(listings)
    if check and any(listing.incomplete for listing in listings):
        with tempfile.TemporaryDirectory() as folder:
            models = [listing for listing in listings if listing.path.kind == "model"]
            check(_replace_paths(config, local | _link_headers(models, Path(folder))))
    return _replace_paths(config, local | _download(listings))


def fetch_headers(config: Config, folder: Path) -> Config:
    """Copies the config with every `hf:` path of a model replaced by files in `folder`.

    Files that the cache lacks end after their header. Raises as `fetch_files` does.
    """
    local, listings = _look_up_all(_name_paths(config))
    return _replace_paths(config, local | _link_headers(listings, folder))


def _name_paths(config: Config) -> dict[str, tuple[str, ...]]:
    """The `hf:` paths of a config's models, and the patterns of files to take of each."""
    student = TOKENIZER if config.student.init == "random" else MODEL
    paths: dict[str, tuple[str, ...]] = {}
    for path, wanted in (
        (config.teacher.path, MODEL),
        (config.student.path, student),
        (config.data.tokenizer, TOKENIZER),
    ):
        if path.startswith(PREFIX):
            paths.setdefault(path, wanted)
    return paths


def _name_text(config: Config) -> dict[str, tuple[str, ...]]:
    parts = ",".join((config.data.train, config.data.heldout)).split(",")
    return {part.strip(): TEXT for part in parts if part.strip().startswith(PREFIX)}


def _replace_paths(config: Config, local: Mapping[str, str]) -> Config:
    config = copy.deepcopy(config)

    def replace(names: str) -> str:
        parts = [part.strip() for part in names.split(",")]
        if local.keys().isdisjoint(parts):
            return names
        return ",".join(local.get(part, part) for part in parts)

    for section, name in (
        (config.teacher, "path"),
        (config.student, "path"),
        (config.data, "tokenizer"),
        (config.data, "train"),
        (config.data, "heldout"),
    ):
        setattr(section, name, replace(getattr(section, name)))
    return config


def fetch_path(path: str | os.PathLike[str], wanted: tuple[str, ...] = MODEL) -> str:
    """Returns the local file or folder of an `hf:` path; any other path stays as it is.

    For `TEXT` returns globs of a data set's files, joined by commas.
    Raises `MissingFileError` for files that the Hub does not have.
    """
    path = os.fspath(path)
    return _fetch({path: wanted})[path] if path.startswith(PREFIX) else path


def origin(path: str | os.PathLike[str]) -> str | None:
    """Returns the `hf:` path, with its commit, of a file in the Hub's cache; None for others."""
    match = _CACHED.search(os.fspath(path))
    if not match:
        return None
    kind, repository, commit, file = match.groups()
    name = repository.replace("--", "/") + (f"/{file}" if file else "")
    return f"hf:{'datasets/' if kind == 'dataset' else ''}{name}@{commit}"


def _fetch(paths: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the local path of each, or globs joined by commas for text."""
    local, listings = _look_up_all(paths)
    _check_room(listings)
    return local | _download(listings)


def _look_up_all(paths: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, str], list[_Listing]]:
    """Looks up paths on this machine, by their names, and the others on the Hub."""
    listings, local, problems = [], dict[str, str](), list[str]()
    for text, wanted in paths.items():
        path = HubPath.parse(text, wanted)
        if found := path.find_local():
            _log.info("%s is used for %s", found, text)
            local[text] = str(found)
            continue
        try:
            listings.append(_look_up(path, wanted))
        except MissingFileError as error:
            problems.append(str(error))
    if problems:
        raise MissingFileError("\n".join(problems))
    return local, listings


# --- looking up ---------------------------------------------------------------------------------


def _look_up(path: HubPath, wanted: tuple[str, ...]) -> _Listing:
    """Asks the Hub which files a path stands for, or the cache where the Hub does not answer."""
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
        )
        for name in names
        if not (snapshot / name).exists()
    ]
    if missing and info.gated:
        with _explaining(path):
            api.auth_check(path.repository, repo_type=path.kind)
    return _Listing(path, names, snapshot, missing)


def _look_in_cache(path: HubPath, wanted: tuple[str, ...], error: "_UnreachableError") -> _Listing:
    """Looks up a path in the cache; raises `error` if the cache does not have all of its files."""
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
    """Selects the names that match, in order; raises `MissingFileError` if a needed one is missing.

    Weights of a Transformers folder are needed, and so is a file that is taken with others.
    """
    files = list(files)
    names = sorted(name for name in files if any(fnmatch.fnmatchcase(name, p) for p in patterns))
    if path.kind == "dataset" and patterns != [path.file]:
        names = _choose_of_folder(path, names)
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
        f"{path.text}: found no {', '.join(absent or _name_wanted(patterns))} in {path.repository}."
        f"{suggest(path.file, files)} It holds {_shorten(files) or 'nothing'}."
    )


def _name_wanted(patterns: list[str]) -> list[str]:
    """The patterns, without the many of packed files."""
    return [pattern for pattern in patterns if not pattern.endswith((".gz", ".zst"))]


def _choose_of_folder(path: HubPath, names: list[str]) -> list[str]:
    """Chooses the files of a data set, or of a folder of it."""
    prefix = f"{path.file}/" if path.file else ""
    chosen = [prefix + name for name in choose_tables(n.removeprefix(prefix) for n in names)]
    if others := [name for name in names if name not in chosen]:
        _log.info(
            "%s: %s of %s files of records are read, not %s; name a file, or a glob, to read it",
            *(path.text, len(chosen), len(names), _shorten(others, 3)),
        )
    return chosen


def _shorten(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def _storage(path: HubPath) -> Path:
    """The repository's folder in the cache: https://huggingface.co/docs/huggingface_hub."""
    from huggingface_hub import constants

    name = f"{path.kind}s--{path.repository.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name


# --- downloads ----------------------------------------------------------------------------------


def _check_room(listings: list[_Listing]) -> None:
    """Says how much is to be downloaded; raises `WriteError` if the disk has no room for it."""
    missing = [file for listing in listings for file in listing.missing]
    if not missing:
        return
    names = ", ".join(dict.fromkeys(file.path.text for file in missing))
    total, cache = sum(file.rest for file in missing), _storage(missing[0].path).parent
    _log.info("%s: %s to download, to %s", names, _show(total), cache)
    if total > _free(cache):
        raise WriteError(_no_room(names, f"{_show(total)} to download", cache))


def _download(listings: list[_Listing]) -> dict[str, str]:
    """Downloads missing files with `huggingface_hub`; returns the local path of each listing.

    Compares the SHA-256 of large files with the Hub's, which `huggingface_hub` does not.
    """
    from huggingface_hub import snapshot_download

    local = {}
    for listing in listings:
        path = listing.path
        if listing.missing:
            with _explaining(path):
                folder = snapshot_download(
                    path.repository,
                    repo_type=path.kind,
                    revision=path.revision or None,  # the cache then knows it without the Hub
                    allow_patterns=[glob.escape(name) for name in listing.names],
                )
            listing = dataclasses.replace(listing, snapshot=Path(folder))
            for file in listing.missing:
                _check_bytes(file, listing.snapshot / file.name)
        local[path.text] = listing.local()
        _log.info("%s: commit %s", path.text, listing.snapshot.name)
    return local


def _check_bytes(file: _File, here: Path) -> None:
    """Deletes a large file, and raises, if its SHA-256 is not the Hub's."""
    if not file.sha256:
        return
    with here.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != file.sha256:
        here.resolve().unlink()
        here.unlink(missing_ok=True)
        raise MissingFileError(
            f"{file.path.text}: found SHA-256 {sha256} of the downloaded {file.name}; expected "
            f"{file.sha256}. It was deleted: start again."
        )


def _link_headers(listings: list[_Listing], folder: Path) -> dict[str, str]:
    """Returns the local path of each listing, in `folder` if only a file's header is here.

    Small files are downloaded in full.
    """
    local = {}
    for listing in listings:
        path = listing.path
        if listing.missing:
            snapshot = folder / path.repository.replace("/", "--") / listing.snapshot.name
            sources = {name: listing.snapshot / name for name in listing.names}
            with _explaining(path):
                sources |= {file.name: _fetch_header(file) for file in listing.missing}
            for name, source in sources.items():
                link = snapshot / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(source)
            listing = dataclasses.replace(listing, snapshot=snapshot)
        local[path.text] = listing.local()
    return local


def _fetch_header(file: _File) -> Path:
    """Reads the file's first `HEADER` bytes by range, unless they are here; small files in full."""
    from huggingface_hub import get_session, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    where: Any = dict(repo_type=file.path.kind, revision=file.commit)
    if not file.large:
        return Path(hf_hub_download(file.path.repository, file.name, **where))
    if file.header.exists():
        return file.header
    _log.info("%s: %s of %s to read", file.name, _show(HEADER), _show(file.size))
    url = hf_hub_url(file.path.repository, file.name, **where)
    headers = build_hf_headers() | {"Range": f"bytes=0-{HEADER - 1}"}
    try:
        file.header.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if refused := WriteError.of(file.header.parent, error, "HOME=DIR"):
            raise refused from error
        raise
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        with tempfile.NamedTemporaryFile(dir=file.header.parent, delete=False) as part:
            aside = Path(part.name)
            try:
                for data in response.iter_bytes():  # the full file, if a server ignores ranges
                    part.write(data[: HEADER - part.tell()])
                    if part.tell() == HEADER:
                        break
                if part.tell() < HEADER:
                    raise OSError(f"it ended after {part.tell():,} of {HEADER:,} bytes")
                part.flush()  # a full disk raises here, not after the renaming
                os.fsync(part.fileno())
                aside.replace(file.header)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
    return file.header


def _free(folder: Path) -> int:
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def _show(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


# --- uploads ------------------------------------------------------------------------------------


def check_repository(repository: str) -> HubPath:
    """Raises `UserError` unless the text is ORG/REPO, a name of the Hub's, and nothing else."""
    with contextlib.suppress(UserError):
        path = HubPath.parse(f"{PREFIX}{repository}", MODEL)
        if not (path.file or path.revision):
            return path
    raise UserError(
        f"found {repository!r}; expected ORG/REPO, without a file or a revision, as on the Hub."
    )


def upload(repository: str, files: Mapping[str, Path | bytes], *, private: bool = False) -> str:
    """Uploads files, by their name in a model repository, in one commit; returns its address.

    The repository is made if the account has none of this name; other files in it stay. The token
    is `huggingface_hub`'s: HF_TOKEN or `hf auth login`. Raises `UserError` for another form of
    name, and `MissingFileError` where the Hub refuses or does not answer; then nothing is changed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    path = check_repository(repository)
    operations = [CommitOperationAdd(name, source) for name, source in files.items()]
    total = sum(operation.upload_info.size for operation in operations)
    _log.info("%s: %d files, %s to upload", repository, len(files), _show(total))
    api = HfApi()
    try:
        with _explaining(path):
            api.create_repo(repository, private=private or None, exist_ok=True)
            made = api.create_commit(
                repository, operations, commit_message="Upload by kdjax", repo_type="model"
            )
    except _UnreachableError as error:
        cause = type(error.__cause__).__name__
        raise MissingFileError(
            f"{repository}: the Hub does not answer ({cause}), and nothing was changed there. With "
            "a network, the same command does all of it."
        ) from error
    return str(made.commit_url)


# --- errors -------------------------------------------------------------------------------------


class _UnreachableError(MissingFileError):
    """The Hub does not answer; its cache may have the file."""


def _no_room(name: str, found: str, cache: Path) -> str:
    return (
        f"{name}: found {found} and {_show(_free(cache))} free in {cache}; expected room for it. "
        "Free some, or set HF_HOME to a folder of another disk. Complete files are "
        "kept: the same command downloads the others."
    )


@contextlib.contextmanager
def _explaining(path: HubPath) -> Iterator[None]:
    """Turns errors of huggingface_hub into a `UserError` that says what to do."""
    from huggingface_hub import constants, errors, get_token

    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{path.repository}"
    token = "the token that was found" if get_token() else "no token"
    login = "`hf auth login`, or the variable HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        raise MissingFileError(
            f"{path.text}: {path.repository} is gated, and {token} opens it. Request access at "
            f"{page}, then set a token of that account: {login}."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MissingFileError(
            f"{path.text}: {hub} has no {path.kind} {path.repository}, or it is private and "
            f"{token} opens it. Check the name; for a private one set a token: {login}."
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
        said = " ".join(str(error).split())
        raise MissingFileError(f"{path.text}: {hub} refuses it ({said}). Try {login}.") from error
    except errors.HTTPError as error:  # pyright: ignore[reportPrivateImportUsage]  # httpx's
        raise _UnreachableError(_unreachable(path, error)) from error
    except UserError:
        raise
    except UnicodeEncodeError as error:  # a header of the request, which is ASCII
        raise MissingFileError(
            f"{path.text}: found a token with the character {error.object[error.start]!r}; "
            f"expected hf_, letters and digits. Set it again: {login}."
        ) from error
    except OSError as error:
        cache = _storage(path).parent
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WriteError(_no_room(path.text, "a full disk", cache)) from error
        if refused := WriteError.of(cache, error, "HF_HOME=DIR"):
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
        "cache lacks some of its files. Complete files are kept: with a network, the same command "
        f"downloads the others. Without one, {local}set the field to local files."
    )

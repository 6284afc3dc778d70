"""The disk cache: one compiled kernel per key, safe for many processes, a killed writer and damaged files.

An entry is three files with one stem, `<plan name>-<key>`: the object (`.o`), the linked library (`.so`; absent where no
C compiler exists) and a record (`.json`) with their checksums, written last. Every file appears by an atomic rename; a
file without a matching record does not count. Writers take a lock per entry, which the system frees if they die.
Called by `store`, `parallel` and `flash-hopper cache`. Plain Python.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

FORMAT = 1  # of the record
LOCK_TIMEOUT_S = (
    300.0  # a writer is done in seconds; after this its lock is ignored, which is safe as renames are atomic
)
_LOCK_POLL_S = 0.02
OBJECT, LIBRARY, RECORD = ".o", ".so", ".json"


class FolderError(Exception):
    """The cache folder cannot be written. Never reaches a caller of the package: `store` moves to a temporary folder."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and checksum of a file of an entry."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """What is known about a stored kernel. `key` is its compile key, `symbol` its plan's name and its name in the
    library; `files` maps a suffix to size and checksum; `created` is UTC; the rest says what made it and how."""

    key: str
    symbol: str
    plan: str
    created: str
    dsl_version: str
    flavour: str
    ffi_version: str
    registers: int
    compile_seconds: float
    files: dict[str, StoredFile]

    @property
    def stem(self) -> str:
        """Name of the entry's files without suffix."""
        return stem_of(self.symbol, self.key)

    @property
    def bytes(self) -> int:
        """Size of the entry's files."""
        return sum(f.bytes for f in self.files.values())


def stem_of(symbol: str, key: str) -> str:
    """File name, without suffix, of the entry of a plan."""
    return f"{symbol}-{key}"


class DiskCache:
    """The entries in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, stem: str, suffix: str) -> Path:
        """Where a file of an entry is, or would be."""
        return self.folder / f"{stem}{suffix}"

    def record(self, stem: str) -> Record | None:
        """The record of an entry; None if there is none that can be read."""
        try:
            return _parse_record(self.path(stem, RECORD).read_bytes(), stem)
        except OSError:
            return None

    def has(self, record: Record, suffix: str) -> bool:
        """True if the file that the record speaks of is there and unchanged."""
        expected = record.files.get(suffix)
        if expected is None:
            return False
        try:
            return _stored_file(self.path(record.stem, suffix)) == expected
        except OSError:
            return False

    def write_object(self, record: Record, object_code: bytes) -> Record:
        """Store a new entry that has an object only; returns its record. Raises FolderError."""
        with self._replacing(record.stem, OBJECT) as temporary:
            temporary.write_bytes(object_code)
        return self._commit(replace(record, files={}), OBJECT)

    @contextlib.contextmanager
    def adding_library(self, record: Record) -> Iterator[Path]:
        """Gives the path to link to; on leaving, the library becomes part of the entry. Raises FolderError."""
        with self._replacing(record.stem, LIBRARY) as temporary:
            yield temporary
        self._commit(record, LIBRARY)

    @contextlib.contextmanager
    def locked(self, stem: str) -> Iterator[None]:
        """Exclude other writers of this entry, in all processes and threads. Raises FolderError."""
        path = self.folder / "locks" / f"{stem}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FolderError(str(error)) from error
        try:
            _wait_for_lock(handle)
            yield
        finally:
            os.close(handle)

    @property
    def is_writable(self) -> bool:
        """True if entries can be added."""
        try:
            with self.locked("probe"):
                return True
        except FolderError:
            return False

    def stems(self) -> list[str]:
        """Entries with any file at all, whole or not."""
        names = self._names()
        return sorted({n.rsplit(".", 1)[0] for n in names if n.endswith((OBJECT, LIBRARY, RECORD)) and n[0] != "."})

    def remove(self, stem: str) -> None:
        """Delete an entry. Raises OSError if the folder cannot be written."""
        for suffix in (RECORD, LIBRARY, OBJECT):
            self.path(stem, suffix).unlink(missing_ok=True)
        (self.folder / "locks" / f"{stem}.lock").unlink(missing_ok=True)

    def remove_leftovers(self, older_than_s: float) -> int:
        """Delete what killed writers left behind; returns how many files that were."""
        left = [self.folder / n for n in self._names() if n.startswith(".") and n.endswith(".tmp")]
        old = [p for p in left if time.time() - p.stat().st_mtime >= older_than_s]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except OSError:
            return []

    @contextlib.contextmanager
    def _replacing(self, stem: str, suffix: str) -> Iterator[Path]:
        """Gives a path to write; what was written takes the entry's name in one step, or vanishes after an error."""
        temporary = self.folder / f".{stem}{suffix}.{uuid4().hex[:8]}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, self.path(stem, suffix))
        except OSError as error:
            raise FolderError(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _commit(self, record: Record, suffix: str) -> Record:
        stored = _stored_file(self.path(record.stem, suffix))
        record = replace(record, files={**record.files, suffix: stored})
        with self._replacing(record.stem, RECORD) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT, **asdict(record)}, indent=1), encoding="utf-8")
        return record


def _wait_for_lock(handle: int) -> None:
    """Take the lock, or go on without one: on a file system without locks, or if its holder hangs."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return


def _stored_file(path: Path) -> StoredFile:
    content = path.read_bytes()
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def _parse_record(text: bytes, stem: str) -> Record | None:
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != FORMAT:
            return None
        files = {suffix: StoredFile(**f) for suffix, f in fields.pop("files").items()}
        record = Record(files=files, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if record.stem == stem else None

"""The disk cache: many writers, a killed writer and damaged files leave either a whole entry or none."""

import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from flash_hopper.compile import disk
from flash_hopper.compile.disk import LIBRARY, OBJECT, RECORD, DiskCache, FolderError, Record

SPAWN = multiprocessing.get_context("spawn")
BLANK = Record("0" * 32, "kernel", "plan", "2026-01-01T00:00:00+00:00", "4.8.1", "cu13", "0.1.15", 168, 1.5, {})


def fill(cache: DiskCache, object_code: bytes = b"object", library: bytes = b"library") -> Record:
    record = cache.write_object(BLANK, object_code)
    with cache.adding_library(record) as path:
        path.write_bytes(library)
    found = cache.record(BLANK.stem)
    assert found is not None
    return found


def test_an_entry_is_read_back_as_it_was_written(tmp_path):
    cache = DiskCache(tmp_path / "made" / "on demand")
    record = fill(cache)
    assert dataclasses.replace(record, files={}) == BLANK
    assert record.bytes == len(b"object") + len(b"library")
    assert cache.stems() == [BLANK.stem]
    assert all(cache.has(record, suffix) for suffix in (OBJECT, LIBRARY))
    assert not list(cache.folder.glob(".*"))


def test_an_empty_or_absent_folder_has_no_entries(tmp_path):
    for cache in (DiskCache(tmp_path), DiskCache(tmp_path / "absent")):
        assert cache.record("kernel-0") is None and cache.stems() == []


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "one byte changed": lambda content: content[:3] + bytes([content[3] ^ 1]) + content[4:],
    "longer": lambda content: content + b"\0",
    "other bytes": lambda content: os.urandom(len(content)),
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [OBJECT, LIBRARY])
def test_a_damaged_file_is_not_taken_for_whole(suffix, damage, tmp_path):
    cache = DiskCache(tmp_path)
    record = fill(cache)
    path = cache.path(record.stem, suffix)
    path.unlink() if DAMAGES[damage] is None else path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert not cache.has(record, suffix)
    assert cache.has(record, LIBRARY if suffix == OBJECT else OBJECT)


@pytest.mark.parametrize("damage", [*DAMAGES, "other format", "field missing", "unknown field", "list", "other key"])
def test_a_damaged_record_is_no_record(damage, tmp_path):
    cache = DiskCache(tmp_path)
    fill(cache)
    path = cache.path(BLANK.stem, RECORD)
    fields = json.loads(path.read_bytes())
    changed = {
        "other format": {**fields, "format": 0},
        "field missing": {k: v for k, v in fields.items() if k != "plan"},
        "unknown field": {**fields, "new": 1},
        "list": [fields],
        "other key": {**fields, "key": "1" * 32},
    }
    if damage == "missing":
        path.unlink()
    elif damage in DAMAGES:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    else:
        path.write_text(json.dumps(changed[damage]))
    record = cache.record(BLANK.stem)
    assert record is None


def test_an_error_while_writing_leaves_the_old_entry_and_no_leftovers(tmp_path):
    cache = DiskCache(tmp_path)
    record = fill(cache)
    with pytest.raises(ZeroDivisionError), cache.adding_library(record) as path:
        path.write_bytes(b"half")
        raise ZeroDivisionError
    assert cache.has(record, LIBRARY) and not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_reported_as_such(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    cache = DiskCache(blocker / "below a file")
    assert not cache.is_writable
    with pytest.raises(FolderError):
        cache.write_object(BLANK, b"x")
    with pytest.raises(FolderError), cache.locked(BLANK.stem):
        pass


def test_new_files_have_the_permissions_of_the_user_so_that_a_folder_can_be_shared(tmp_path):
    before = os.umask(0o002)
    try:
        fill(DiskCache(tmp_path))
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir() if p.is_file()} == {0o664}


def test_removing_deletes_every_file_of_an_entry_and_leaves_the_others(tmp_path):
    cache = DiskCache(tmp_path)
    other = cache.write_object(dataclasses.replace(BLANK, key="f" * 32), b"other")
    fill(cache)
    with cache.locked(BLANK.stem):
        pass
    cache.remove(BLANK.stem)
    assert cache.stems() == [other.stem] and not list(tmp_path.rglob(f"{BLANK.stem}*"))


def test_leftovers_of_killed_writers_are_deleted_once_they_are_old(tmp_path):
    cache = DiskCache(tmp_path)
    fill(cache)
    for age in (0, 1000):
        path = tmp_path / f".kernel-0.so.{age}.tmp"
        path.touch()
        os.utime(path, times=(time.time() - age, time.time() - age))
    assert cache.remove_leftovers(older_than_s=600) == 1
    assert [p.name for p in tmp_path.glob(".*")] == [".kernel-0.so.0.tmp"]
    assert cache.stems() == [BLANK.stem]


def hold_lock(folder: str, ready: str) -> None:
    with DiskCache(Path(folder)).locked("entry"):
        Path(ready).touch()
        time.sleep(60)


def test_the_lock_of_a_killed_writer_is_free(tmp_path):
    ready = tmp_path / "ready"
    holder = SPAWN.Process(target=hold_lock, args=(str(tmp_path), str(ready)))
    holder.start()
    while not ready.exists():
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    start = time.monotonic()
    with DiskCache(tmp_path).locked("entry"):
        pass
    assert time.monotonic() - start < 5


def test_a_holder_that_hangs_does_not_stop_others_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_TIMEOUT_S", 0.1)
    cache = DiskCache(tmp_path)
    with cache.locked("entry"):
        start = time.monotonic()
        with cache.locked("entry"):
            assert 0.1 <= time.monotonic() - start < 5


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    with DiskCache(tmp_path).locked("entry"):
        pass


def test_the_lock_excludes_threads_and_other_entries_go_on(tmp_path):
    cache, inside, most = DiskCache(tmp_path), [], []

    def work() -> None:
        with cache.locked("entry"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    with cache.locked("another entry"):
        pass
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 5


def write_often(folder: str, letter: str) -> None:
    cache = DiskCache(Path(folder))
    for _ in range(50):
        fill(cache, letter.encode() * 10_000, letter.encode() * 20_000)


def test_readers_see_whole_entries_or_none_while_writers_replace_them_without_a_lock(tmp_path):
    cache = DiskCache(tmp_path)
    writers = [SPAWN.Process(target=write_often, args=(str(tmp_path), letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    seen = 0
    while any(w.is_alive() for w in writers):
        record = cache.record(BLANK.stem)
        if record is not None and cache.has(record, LIBRARY):
            # what is behind a checksum is one writer's file
            assert record.files[LIBRARY].sha256 in {sha("a" * 20_000), sha("b" * 20_000)}
            seen += 1
    assert [w.exitcode for w in writers] == [0, 0] and seen


def sha(text: str) -> str:
    return disk.hashlib.sha256(text.encode()).hexdigest()

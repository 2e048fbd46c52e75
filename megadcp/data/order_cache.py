"""Arrays kept in a folder between runs: written under temporary names and renamed, checked when opened, memory-mapped when read.

An entry is one `NAME.FIELD.npy` per array and, written last, `NAME.json` with every array's shape, dtype and checksum: an entry
without its .json does not exist. Processes that share a folder take turns (a lock that the system releases when its holder dies) and
look again after waiting, so each entry is built once; where locks don't work, both build the same bytes and the second rename wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
Say = Callable[[str], None]


class OrderCache:
    """One folder of entries. `folder=None` keeps nothing on disk."""

    def __init__(self, folder: Path | None, say: Say) -> None:
        """`say` gets one line when an entry is damaged or the folder can't be written."""
        self.folder, self.say = folder, say
        self._told = False

    @property
    def place(self) -> str:
        """Where arrays end up, in words."""
        return "memory" if self.folder is None or self._told else str(self.folder)

    def get(self, name: str, build: Callable[[], Arrays], check: bool = False) -> Arrays:
        """The arrays of entry `name`: mapped from disk, or built and then kept if possible. check=True compares checksums too."""
        if self.folder is None:
            return build()
        found = self._load(self.folder, name, check)
        if found is not None:
            return found
        built: Arrays | None = None
        building = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder):
                found = self._load(self.folder, name, check, quiet=True)
                if found is None:
                    building = True
                    built = build()
                    building = False
                    self._store(self.folder, name, built)
                    found = self._load(self.folder, name, check, quiet=True)
        except OSError as error:
            if building:  # not the cache's fault
                raise
            if not self._told:
                self.say(f"order cache {self.folder} can't be written ({error.strerror or error}): every process makes the order in its own memory")
                self._told = True
        return found if found is not None else built if built is not None else build()

    def _load(self, folder: Path, name: str, check: bool, quiet: bool = False) -> Arrays | None:
        manifest = folder / f"{name}.json"
        try:
            described = json.loads(manifest.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._damaged(manifest, str(error), quiet)
            return None
        arrays: Arrays = {}
        for field, (dtype, shape, checksum) in described.items():
            path = folder / f"{name}.{field}.npy"
            try:
                array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                self._damaged(path, str(error), quiet)
                return None
            if [array.dtype.str, list(array.shape)] != [dtype, shape]:
                self._damaged(path, f"expected {dtype} {shape}, found {array.dtype.str} {list(array.shape)}", quiet)
                return None
            if check and _checksum(array) != checksum:
                self._damaged(path, "its checksum is wrong", quiet)
                return None
            arrays[field] = array
        return arrays

    def _damaged(self, path: Path, reason: str, quiet: bool) -> None:
        if not quiet:
            self.say(f"order cache {path} is damaged ({reason}): building it again")

    def _store(self, folder: Path, name: str, arrays: Arrays) -> None:
        manifest = folder / f"{name}.json"
        manifest.unlink(missing_ok=True)  # whoever comes meanwhile must not believe half-replaced files
        for field, array in arrays.items():
            _write(folder / f"{name}.{field}.npy", lambda path, array=array: _save(path, array))  # type: ignore[misc]
        described = {field: [array.dtype.str, list(array.shape), _checksum(array)] for field, array in arrays.items()}
        _write(manifest, lambda path: path.write_text(json.dumps(described)))


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary name in the same folder, then rename; nothing is left behind on failure."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time; waits. File systems without locks let everybody in."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with open(folder / ".lock", "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""What happens in a run folder as it happens (Linux: inotify), and the moments at which tools/kill_test.py kills."""

from __future__ import annotations

import ctypes
import os
import random
import re
import struct
from dataclasses import dataclass
from pathlib import Path

MODIFY, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x8, 0x40, 0x80, 0x100, 0x200
KINDS = {MODIFY: "modify", CLOSE_WRITE: "close", MOVED_FROM: "moved_from", MOVED_TO: "moved_to", CREATE: "create", DELETE: "delete"}
IS_FOLDER, IS_GONE, FOLDERS_ONLY = 0x40000000, 0x8000, 0x01000000
HEAD = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name
READ_BYTES = 1 << 16

# Which change of the run folder starts the clock. Paths are relative to it; hidden ones are what a save or a removal has in hand.
DRAFT, REMOVED = r"checkpoints/\.step-\d+\.draft-\w+", r"checkpoints/\.step-\d+\.removed"
MOMENTS = {
    "a draft appears": rf"create {DRAFT}",
    "a rank begins its file": rf"create {DRAFT}/rank-\d+\.safetensors",
    "a rank writes its file": rf"modify {DRAFT}/rank-\d+\.safetensors",
    "a rank is done": rf"close {DRAFT}/rank-\d+\.safetensors",
    "the index is begun": rf"create {DRAFT}/tensors\.json",
    "meta is begun": rf"create {DRAFT}/meta\.json",
    "the manifest is begun": rf"create {DRAFT}/manifest\.json",
    "the manifest is there": rf"close {DRAFT}/manifest\.json",
    "the checkpoint has its name": r"moved_to checkpoints/step-\d+",
    "the pointer is written": r"create \.latest\.\d+",
    "the pointer has moved": r"moved_to latest",
    "an old one is hidden": rf"moved_to {REMOVED}",
    "files of an old one go": rf"delete {REMOVED}/.+",
    "an old one is gone": rf"delete {REMOVED}",
    "settings are written": r"create \.(run\.yaml|data\.json)\.\d+",
    "a restart cleans up": rf"delete {DRAFT}(/.+)?",
    "a restart takes rows back": r"create \.metrics\.jsonl\.\d+",
    "a row of metrics": r"modify metrics\.jsonl",
    "a plan is kept": r"modify plans\.jsonl",
}
AT_RANDOM = "any time"
RANDOM_SHARE = 0.2  # of the kills
RESTART, RESTART_SHARE = (
    ("settings are written", "a restart cleans up", "a restart takes rows back"),
    0.5,
)  # of those drawn: not every restart has something to do
LATEST_SECONDS = 0.02  # after the change


@dataclass(frozen=True)
class Moment:
    """`seconds` after the `count`-th change of a kind; of AT_RANDOM, after the start."""

    name: str
    count: int
    seconds: float

    def matches(self, change: str) -> bool:
        """Whether a change is of this kind."""
        return self.name != AT_RANDOM and re.fullmatch(MOMENTS[self.name], change) is not None


def draw_moment(rng: random.Random, life_seconds: float) -> Moment:
    """Any time of a life of so many seconds, or at once or within LATEST_SECONDS after a change, short delays more often than long ones."""
    if rng.random() < RANDOM_SHARE:
        return Moment(AT_RANDOM, 0, rng.uniform(0, life_seconds))
    name = rng.choice(list(MOMENTS))
    while name in RESTART and rng.random() > RESTART_SHARE:
        name = rng.choice(list(MOMENTS))
    delay = 0.0 if rng.random() < 0.4 else LATEST_SECONDS * 10 ** rng.uniform(-3, 0)
    return Moment(name, 1 if name in RESTART else rng.randint(1, 4), delay)


class Watch:
    """Changes in a run folder, in its checkpoints' folder and in what is hidden there. A context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = ctypes.CDLL(None, use_errno=True)
        self._handle = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "inotify can't be started")
        self._paths: dict[int, str] = {}
        self._moving: dict[int, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._add("")
        self._add("checkpoints")
        for path in folder.glob("checkpoints/.*"):
            self._add(f"checkpoints/{path.name}")

    def fileno(self) -> int:
        """To be polled."""
        return int(self._handle)

    def changes(self) -> list[str]:
        """What has happened since the last call, as "kind path"."""
        try:
            data = os.read(self._handle, READ_BYTES)
        except BlockingIOError:
            return []
        found, at = [], 0
        while at < len(data):
            number, mask, cookie, size = HEAD.unpack_from(data, at)
            name = data[at + HEAD.size : at + HEAD.size + size].rstrip(b"\0").decode()
            at += HEAD.size + size
            if mask & IS_GONE:
                self._paths.pop(number, None)
            elif number in self._paths and (kind := KINDS.get(mask & 0xFFF)):
                found.append(self._change(kind, os.path.join(self._paths[number], name), cookie, bool(mask & IS_FOLDER)))
        return found

    def _change(self, kind: str, path: str, cookie: int, is_folder: bool) -> str:
        if is_folder and kind == "moved_from":
            self._moving[cookie] = path
        if is_folder and kind == "moved_to":  # a watch stays with what it watches, under its new name
            before = self._moving.pop(cookie, None)
            self._paths = {number: path if one == before else one for number, one in self._paths.items()}
        if is_folder and kind in ("create", "moved_to") and (path == "checkpoints" or path.startswith("checkpoints/.")):
            self._add(path)
        return f"{kind} {path}"

    def _add(self, path: str) -> None:
        wanted = MODIFY | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | FOLDERS_ONLY
        number = self._library.inotify_add_watch(self._handle, os.fsencode(self.folder / path), wanted)
        if number >= 0:  # it may be gone again
            self._paths[number] = path

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

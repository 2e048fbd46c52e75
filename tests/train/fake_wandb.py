"""A package that is called wandb and behaves as a test wants: it keeps its calls in calls.jsonl of the run folder."""

import json
from pathlib import Path

FAKE = """
import json, os, sys, time
BEHAVIOUR = {behaviour!r}
print("wandb: talks to people")

def note(folder, **what):
    with open(os.path.join(folder, "calls.jsonl"), "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **values):
        self.values = values

class Run:
    def __init__(self, folder, offline):
        self.folder, self.offline, self.dir, self.url = folder, offline, folder + "/wandb/offline-run/files", "https://wandb.example/run"

    def define_metric(self, name, step_metric=None):
        note(self.folder, call="define_metric", name=name, step_metric=step_metric)

    def log(self, row, step):
        if BEHAVIOUR == "log hangs":
            time.sleep(1000)
        if BEHAVIOUR == "log raises":
            raise RuntimeError("the service is gone")
        if BEHAVIOUR == "log dies":
            os._exit(7)
        note(self.folder, call="log", row=row, step=step)

    def finish(self, exit_code):
        note(self.folder, call="finish", exit_code=exit_code, pid=os.getpid())
        if BEHAVIOUR == "finish hangs":
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            note(self.folder, call="child", pid=child.pid)
            time.sleep(1000)

def init(**values):
    note(values["dir"], call="init", stdin=sys.stdin.read(), **{{key: value for key, value in values.items() if key != "settings"}})
    if BEHAVIOUR == "slow init":
        time.sleep(2)
    if BEHAVIOUR == "init raises" or (BEHAVIOUR == "no network" and values["mode"] != "offline"):
        raise RuntimeError("no way\\nto the server")
    if BEHAVIOUR == "init hangs":
        time.sleep(1000)
    return Run(values["dir"], values["mode"] == "offline" or BEHAVIOUR == "no key")

def teardown():
    pass
"""


def write_fake(folder: Path, behaviour: str) -> None:
    """Make `import wandb` find it where `folder` is searched."""
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    (folder / "wandb" / "__init__.py").write_text(FAKE.format(behaviour=behaviour))


def calls(folder: Path, name: str) -> list[dict]:
    """The calls of one function in a run folder, in order."""
    path = folder / "calls.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["call"] == name]

"""Train a GPT: `python pretrain_gpt.py [experiment=NAME] [setting=value ...]`.

    python pretrain_gpt.py                                  the quickstart: a small GPT from nothing, within minutes
    python pretrain_gpt.py experiment=gpt_8b --cfg job      show what a run would be, without running it
    python pretrain_gpt.py optim.lr=3e-3 run.name=faster    a run of your own
    python pretrain_gpt.py -m optim.lr=1e-3,3e-3,1e-2       one run after another, each in a folder of its own

The same command resumes an unfinished run and shows the result of a finished one. Exit codes: 0 done, 1 failed, 2 the request is
wrong, 75 stopped by a signal after saving.
"""

import sys
from pathlib import Path

from megadcp.config import load
from megadcp.train import entry

if __name__ == "__main__":
    sys.exit(load.command_line(entry.start, Path(__file__).resolve().parent / "configs"))

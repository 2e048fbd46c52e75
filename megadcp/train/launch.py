"""How a process becomes a rank: join the ranks that torchrun, srun or `supervise` started, or be the only one.

    with launch.join(config) as world:
        settings = world.first(lambda: read_or_refuse())   # rank 0 does it, all get the result
        ... train on world.mesh as world.rank ...

torch is imported by join(), not by this module: `place()` costs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.mesh.coords import Mesh
from megadcp.train.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from megadcp.train.signals import STOPPED

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")
TIMEOUT_SECONDS = 600.0  # of one collective, and of waiting for the other ranks at the start
LEAVE_SECONDS = 5.0  # in which rank 0, at the end, keeps the store for the others
STACKS = signal.SIGUSR2  # makes a supervised rank write where its threads are
SUPERVISOR = "MEGADCP_SUPERVISOR"  # its process id
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """What the environment says of this process. `by` names who started it: torchrun, srun, or nobody ("")."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    by: str = ""


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Where this process stands among the ranks.

    Raises:
        UserError: the environment is that of a launcher, but incomplete.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local = _number(environment, "LOCAL_RANK", 0 if world == 1 else None)
        return Place(rank, world, local, environment.get("MASTER_ADDR", "127.0.0.1"), _number(environment, "MASTER_PORT", 29500), "torchrun")
    in_step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "")).isdecimal()
    if in_step and "SLURM_PROCID" in environment:  # a batch script has a SLURM_PROCID, too, but no step
        world = _number(environment, "SLURM_STEP_NUM_TASKS", None if "SLURM_NTASKS" not in environment else _number(environment, "SLURM_NTASKS"))
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or "127.0.0.1"
        job, step = _number(environment, "SLURM_JOB_ID", 0), _number(environment, "SLURM_STEP_ID", 0)
        port = _number(environment, "MASTER_PORT", 10000 + (job * 8 + step) % 10000)  # below the ports of submitted jobs
        host = environment.get("MASTER_ADDR") or first_host(nodes)
        return Place(_number(environment, "SLURM_PROCID"), world, _number(environment, "SLURM_LOCALID"), host, port, "srun")
    return Place()


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        if text == "" and default is not None:
            return default
        what = f"{name}={text!r} is no number" if text else f"{name} is not set"
        raise UserError(f"{what}, though this process was started as one rank of several; start it by torchrun or srun, or with cluster=local")
    return int(text)


def first_host(nodes: str) -> str:
    """The first of SLURM's node list: "gpu[007-009,12],login1" -> "gpu007"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


@dataclass
class World:
    """One rank among all. As a context it says goodbye: in order when all went well, at once after an error.

    The first rank that fails keeps its exception. Those that fail after it, most often because of it, say one line and leave with SystemExit:
    under torchrun and srun, too, the user sees one traceback, and a request that all refuse is refused once.
    """

    rank: int
    world_size: int
    local_rank: int
    mesh: Mesh
    device: torch.device
    _store: Any = None
    _hosts_store: bool = False
    _calls: int = 0
    _failure: list[int] = field(default_factory=list)  # the exit code, once it has failed

    def first(self, action: Callable[[], Value]) -> Value:
        """action() on rank 0 alone; all ranks get what it returns (pickled), however long it takes.

        An exception is rank 0's: it is raised there, and the other ranks leave silently with the same exit code.
        """
        if self._store is None:
            return action()
        self._calls += 1
        key = f"first/{self._calls}"
        if self.rank == 0:
            try:
                value = action()
                message = pickle.dumps((0, value))
            except BaseException as error:
                _record(error)  # before the others leave
                self._store.set(key, pickle.dumps((_code_of(error) or 1, None)))
                raise
            self._store.set(key, message)
            return value
        self._store.wait([key], timedelta(days=30))
        code, value = pickle.loads(self._store.get(key))
        if code:
            raise SystemExit(code)
        return value

    def close(self) -> None:
        """Leave torch.distributed. Nothing to do in a world of one rank."""
        if self._store is None:
            return
        import torch.distributed as dist

        with contextlib.suppress(dist.DistError, RuntimeError):
            arrived = self._store.add("left", 1)
            end = time.monotonic() + LEAVE_SECONDS
            while self._hosts_store and arrived < self.world_size and time.monotonic() < end:
                time.sleep(0.01)
                arrived = self._store.add("left", 0)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._store is not None:  # what is under way may never end, so nothing is closed
            _record(error)
            self._failure.append(_code_of(error))
            if isinstance(error, Exception) and not self._is_first_failure():
                if not isinstance(error, UserError):
                    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    print(f"rank {self.rank} ends after the failure of another rank ({text})", file=sys.stderr, flush=True)
                raise SystemExit(self._failure[0]) from None

    def _is_first_failure(self) -> bool:
        """Whether no other rank has failed before. Without an answer rank 0, which has the store, has gone before."""
        try:
            self._store.set_timeout(timedelta(seconds=LEAVE_SECONDS))
            return bool(self._store.add("failed", 1) == 1)
        except Exception:  # whatever the store raises: the error of this rank counts
            return self.rank == 0


def join(config: Config, timeout_s: float = TIMEOUT_SECONDS) -> World:
    """Become a rank of the world that `config` asks for.

    Raises:
        UserError: this process belongs to a world of another size, the ranks don't find each other, or there are too few GPUs.
    """
    here = place()
    _guard()
    with contextlib.suppress(AttributeError, ValueError, OSError, RuntimeError):  # no stderr
        faulthandler.register(STACKS, file=2, all_threads=True)
    _check_size(here, config)
    for name, value in config.cluster.environment.items():  # before torch, CUDA and NCCL read it; the shell's own word counts
        os.environ.setdefault(name, value)
    import torch

    device = _device(config, here)
    if here.world > 1 and config.cluster.threads:
        torch.set_num_threads(config.cluster.threads)
    parallel = config.parallel
    mesh = Mesh(here.world // (parallel.tp * parallel.pp), parallel.tp, parallel.pp)
    world = World(here.rank, here.world, here.local_rank, mesh, device)
    if here.world > 1:
        _connect(world, here, timeout_s)
    return world


def exit_code(action: Callable[[], int]) -> int:
    """The main program of a rank: what `action` returns; a UserError's code, which is 2 as a rule, with one line on stderr."""
    try:
        return action()
    except UserError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


# ---------------------------------------------------------------------------------------------------------------- joining
def _check_size(here: Place, config: Config) -> None:
    """All ranks see the same fault; rank 0 says it, the others leave silently."""
    cluster, ranks = config.cluster, config.parallel.tp * config.parallel.pp
    message = ""
    if here.world != cluster.world:
        asked = f"cluster.nodes={cluster.nodes} x cluster.processes={cluster.processes} = {cluster.world} ranks are asked for"
        if here.by:
            message = f"{here.by} started {here.world} ranks, but {asked}; start {cluster.world}, or set these two to {here.world} ranks"
        else:
            message = f"one process was started alone, but {asked}; start them by srun or torchrun, or set cluster.nodes=1 cluster.processes=1"
    elif here.world % ranks:
        message = f"parallel.tp={config.parallel.tp} x parallel.pp={config.parallel.pp} = {ranks} does not divide {here.world} ranks"
    if message and here.rank == 0:
        raise UserError(message)
    if message:
        raise SystemExit(2)


def _device(config: Config, here: Place) -> torch.device:
    """The device of this rank; a GPU becomes the current one.

    Raises:
        UserError: fewer GPUs than ranks here.
    """
    import torch

    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("cluster.device=cuda, but torch sees no GPU here; use cluster.device=cpu or auto")
    count = torch.cuda.device_count()
    index = 0 if here.by == "srun" and count == 1 else here.local_rank  # srun may show each rank its own GPU only
    if index >= count:
        raise UserError(f"local rank {here.local_rank} has no GPU: torch sees {count} here; legal: cluster.processes={count}, or cluster.device=cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _connect(world: World, here: Place, timeout_s: float) -> None:
    """Find the other ranks and start torch.distributed: gloo for CPU tensors, NCCL for those of a GPU."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if here.host in LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    url = f"tcp://{here.host}:{here.port}"
    try:
        store, _, _ = next(rendezvous(url, here.rank, here.world, timeout=timeout))
        backend = "gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=PrefixStore("torch", store), rank=here.rank, world_size=here.world, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {here.rank} of {here.world} can't meet the others at {here.host}:{here.port} ({reason}); MASTER_ADDR and MASTER_PORT choose "
            "another place"
        ) from None
    world._store = PrefixStore("megadcp", store)
    world._hosts_store = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    atexit.register(_leave, world._failure)


def _leave(failure: list[int]) -> None:
    """End a failed process at once: torch would wait here for operations that never finish. Registered early, so it runs late."""
    if failure:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure[0])


# ------------------------------------------------------------------------------------------------------------- supervised
def _guard() -> None:
    """Under `supervise`: end with the supervisor, however that ends, and show the stacks when it asks for them."""
    supervisor = os.environ.get(SUPERVISOR, "")
    if not supervisor:
        return
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):
        _orphaned()


def _orphaned() -> NoReturn:
    os._exit(1)


def _code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return error.code if isinstance(error, UserError) else 1


def _record(error: BaseException) -> None:
    """Write when and how this rank failed where torch's launchers look for it, once; theirs has whole seconds, ours all digits."""
    path = os.environ.get(ERROR_FILE, "")
    if not path or _code_of(error) == STOPPED:  # which is no failure
        return
    text = f"error: {error}\n" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "nanoseconds": time.time_ns()}
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)

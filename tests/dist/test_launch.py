"""Becoming a rank: what the environment says, worlds of the wrong size, and what rank 0 does for all."""

import os
import socket
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks

from megadcp.config.check import UserError
from megadcp.config.schema import ClusterConfig, Config, ParallelConfig
from megadcp.mesh.coords import Mesh
from megadcp.train import launch
from megadcp.train.launch import Place, first_host, place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[07-09,12]",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*TORCHRUN, *SRUN, launch.SUPERVISOR, launch.ERROR_FILE, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def config(processes: int = 1, nodes: int = 1, tp: int = 1, pp: int = 1, device: str = "cpu") -> Config:
    return Config(cluster=ClusterConfig(nodes=nodes, processes=processes, device=device), parallel=ParallelConfig(tp=tp, pp=pp))


def test_places():
    assert place({}) == Place(0, 1, 0, "", 0, "")
    assert place(TORCHRUN) == Place(5, 8, 1, "node1", 1234, "torchrun")
    assert place({**SRUN, **TORCHRUN}) == place(TORCHRUN)
    assert place({"RANK": "0", "WORLD_SIZE": "1"}) == Place(0, 1, 0, "127.0.0.1", 29500, "torchrun")
    assert place(SRUN) == Place(5, 8, 1, "gpu07", 10616, "srun")
    assert place({**SRUN, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu09"}) == Place(5, 6, 1, "gpu09", 10616, "srun")
    assert place({**SRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}) == Place(5, 8, 1, "127.0.0.1", 4000, "srun")
    assert place({**SRUN, "SLURM_STEP_ID": "1"}).port != place(SRUN).port
    batch_script = {name: text for name, text in SRUN.items() if name != "SLURM_STEP_ID"}
    assert place(batch_script) == Place()
    shell = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967290"}
    assert place(shell) == Place()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({name: text for name, text in SRUN.items() if name != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        ({name: text for name, text in SRUN.items() if name != "SLURM_NTASKS"}, "SLURM_STEP_NUM_TASKS is not set"),
    ],
)
def test_half_an_environment_is_refused(environment, told):
    with pytest.raises(UserError, match=told):
        place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"), ("node1,node2", "node1"), ("n[1-4]", "n1"), ("gpu[007-009,12],login1", "gpu007"), ("a-b[03,5-7]c", "a-b03c"),
        ("rack[2-3]n[10-12]", "rack2n10"), ("10.0.0.1", "10.0.0.1"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_a_world_of_one():
    with launch.join(config()) as world:
        assert (world.rank, world.world_size, world.local_rank, world.mesh, world.device) == (0, 1, 0, Mesh(1), torch.device("cpu"))
        assert not dist.is_initialized()
        assert world.first(lambda: 7) == 7
    world.close()
    with pytest.raises(KeyError), launch.join(config()):
        raise KeyError


def test_the_environment_of_the_cluster_fills_what_the_shell_left_open(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MEGADCP_TEST_A", "x")  # so that both are as before afterwards
    monkeypatch.delenv("MEGADCP_TEST_A")
    asked = config()
    asked = replace(asked, cluster=replace(asked.cluster, environment={"NCCL_DEBUG": "WARN", "MEGADCP_TEST_A": "1"}))
    with launch.join(asked):
        assert (os.environ["NCCL_DEBUG"], os.environ["MEGADCP_TEST_A"]) == ("INFO", "1")


def test_a_process_alone_for_many_ranks_is_refused():
    with pytest.raises(UserError, match=r"one process was started alone, but cluster.nodes=2 x cluster.processes=8 = 16 ranks are asked for"):
        launch.join(config(8, nodes=2))


def test_a_launcher_of_another_size_is_refused_by_rank_0_alone(monkeypatch):
    for name, text in {**TORCHRUN, "RANK": "0"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=r"torchrun started 8 ranks, but cluster.nodes=1 x cluster.processes=4 = 4 ranks are asked for; start 4"):
        launch.join(config(4))
    with pytest.raises(UserError, match=r"parallel.tp=3 x parallel.pp=1 = 3 does not divide 8 ranks"):
        launch.join(config(8, tp=3))
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(SystemExit) as caught:
        launch.join(config(4))
    assert caught.value.code == 2


def test_fewer_gpus_than_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert launch._device(config(device="auto"), Place(3, 4, 1)) == torch.device("cuda", 1)
    assert launch._device(config(device="cpu"), Place(3, 4, 1)) == torch.device("cpu")
    with pytest.raises(UserError, match=r"local rank 2 has no GPU: torch sees 2 here; legal: cluster.processes=2"):
        launch._device(config(device="cuda"), Place(2, 4, 2, by="srun"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch._device(config(device="cuda"), Place(3, 4, 3, by="srun")) == torch.device("cuda", 0)  # srun shows each task its own
    assert chosen == [1, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU"):
        launch._device(config(device="cuda"), Place())
    assert launch._device(config(device="auto"), Place()) == torch.device("cpu")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_torchrun(rank: int, world: int, port: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})


def as_srun(rank: int, world: int, port: int) -> None:
    os.environ.update(SRUN)
    values = {"SLURM_PROCID": rank, "SLURM_NTASKS": world, "SLURM_LOCALID": rank, "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})


@pytest.mark.parametrize("start", [as_torchrun, as_srun])
def test_ranks_meet(start):
    def work(rank, world_size, port):
        start(rank, world_size, port)
        with launch.join(config(4, tp=2), timeout_s=30) as world:
            x = torch.tensor(float(rank))
            dist.all_reduce(x)
            assert (world.rank, world.world_size, world.local_rank, world.mesh) == (rank, 4, rank, Mesh(2, 2))
            calls = [world.first(lambda: ("value of", rank)), world.first(lambda: None)]
        return x.item(), calls, dist.is_initialized()

    assert run_ranks(4, work, free_port(), connect=False) == [(6.0, [("value of", 0), None], False)] * 4


def test_what_rank_0_refuses_ends_all_and_is_told_once(tmp_path):
    def work(rank, world_size, port):
        as_torchrun(rank, world_size, port)
        os.environ[launch.ERROR_FILE] = str(tmp_path / f"error-{rank}")

        def refuse():
            raise UserError("there is no such data")

        try:
            with launch.join(config(3), timeout_s=30) as world:
                world.first(refuse)
        except BaseException as error:
            return type(error), str(error), launch._code_of(error), world._failure
        return None

    results = run_ranks(3, work, free_port(), connect=False)
    assert results[0] == (UserError, "there is no such data", 2, [2])
    assert results[1:] == [(SystemExit, "2", 2, [2])] * 2
    times = [os.stat(tmp_path / f"error-{rank}").st_mtime_ns for rank in range(3)]
    assert times[0] == min(times)


def test_ranks_that_do_not_come():
    def work(rank, world_size, port):
        as_torchrun(rank + 1, 3, port)  # rank 0 is missing
        with pytest.raises(UserError, match=f"can't meet the others at 127.0.0.1:{port}.*MASTER_PORT"):
            launch.join(config(3), timeout_s=1)
        return True

    assert run_ranks(2, work, free_port(), connect=False) == [True, True]


def test_an_error_leaves_at_once_though_a_sum_is_under_way():
    def work(rank, world_size, port):
        as_torchrun(rank, world_size, port)
        with launch.join(config(2), timeout_s=60):
            if rank == 1:
                dist.all_reduce(torch.ones(1), async_op=True)
                raise KeyError("the cause")
            time.sleep(600)

    with pytest.raises(RankFailed, match="the cause") as caught:
        run_ranks(2, work, free_port(), connect=False, timeout_s=20)
    assert caught.value.rank == 1


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_keeps_its_exception_and_the_others_say_one_line(culprit, tmp_path):
    def work(rank, world_size, port):
        as_torchrun(rank, world_size, port)
        sys.stderr = (tmp_path / f"stderr-{rank}").open("w", encoding="utf-8")
        try:
            with launch.join(config(3), timeout_s=30):
                if rank == culprit:
                    raise KeyError("the cause")
                dist.all_reduce(torch.ones(1))
        except BaseException as error:
            if rank == culprit:
                dist.destroy_process_group()  # as the end of the process would
            return type(error), launch._code_of(error)

    results = run_ranks(3, work, free_port(), connect=False)
    for rank, result in enumerate(results):
        text = (tmp_path / f"stderr-{rank}").read_text(encoding="utf-8")
        assert result == ((KeyError if rank == culprit else SystemExit), 1)
        assert text == "" if rank == culprit else text.startswith(f"rank {rank} ends after the failure of another rank (")


def test_a_request_that_all_refuse_is_refused_once_under_any_launcher():
    def work(rank, world_size, port):
        as_torchrun(rank, world_size, port)
        try:
            with launch.join(config(3), timeout_s=30):
                raise UserError("a wrong wish")
        except BaseException as error:
            return type(error), launch._code_of(error)

    results = run_ranks(3, work, free_port(), connect=False)
    assert sorted(results, key=str) == sorted([(UserError, 2), (SystemExit, 2), (SystemExit, 2)], key=str)


def test_exit_codes(capfd):
    def raising(error):
        def action():
            raise error

        return action

    assert launch.exit_code(lambda: 75) == 75
    assert launch.exit_code(raising(UserError("a wish"))) == 2
    assert capfd.readouterr().err == "error: a wish\n"
    assert launch.exit_code(raising(KeyboardInterrupt())) == 130
    with pytest.raises(KeyError):
        launch.exit_code(raising(KeyError()))
    errors = (SystemExit(3), SystemExit("text"), SystemExit(None), UserError("x"), KeyboardInterrupt(), KeyError())
    assert [launch._code_of(error) for error in errors] == [3, 1, 0, 2, 130, 1]

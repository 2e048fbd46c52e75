"""The images: what the Dockerfiles use exists, a broken file is found, hadolint has nothing to say, and versions are judged rightly.

No image was built here: that needs a Docker engine.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megadcp.config.load import compose

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"docker_{name}", ROOT / "docker" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


checker, versions = load("check"), load("versions")


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "Dockerfile"
    path.write_text(text, encoding="utf-8")
    return checker.Checker(path).run()


def test_both_are_there():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_file_and_command_exists(path):
    assert checker.Checker(path).run() == []


def test_the_command():
    done = subprocess.run([sys.executable, "docker/check.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Dockerfile.cpu" in done.stdout


GOOD = """
FROM python:3.11-slim AS base
WORKDIR /opt/megadcp
COPY setup.py README.md ./
COPY tools tools
RUN python tools/plan.py --help \\
    # a comment between
    && pip install -e ".[dev]"
FROM base
COPY --from=base /a /b
USER 10001
ENTRYPOINT ["python", "/opt/megadcp/tools/generate.py"]
"""


def test_a_good_one_passes(tmp_path):
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("COPY tools tools", "COPY tolls tools", "Dockerfile:5: COPY tolls: not in the repository"),
        ("COPY tools tools", "COPY tools/plan.py tools/", "generate.py: not in the image"),
        ("COPY tools tools", "COPY tools elsewhere", "tools/plan.py: not in the image at this point (/opt/megadcp/tools/plan.py)"),
        ("tools/plan.py", "tools/plans.py", "Dockerfile:6: tools/plans.py: not in the image"),
        ("WORKDIR /opt/megadcp", "WORKDIR /opt/other", "tools/generate.py: not in the image"),
        ("generate.py", "generates.py", "Dockerfile:12: /opt/megadcp/tools/generates.py: not in the image"),
        ("--from=base", "--from=bace", "--from=bace: no earlier stage"),
        ("[dev]", "[dve]", "setup.py has no extra dve; legal here: cluster, data, dev"),
        ("3.11-slim AS", "latest AS", "python:latest is not pinned"),
        ("python:3.11-slim AS", "python AS", "python is not pinned"),
        ("USER 10001", "USER root", "the image's user is root"),
        ("USER 10001\n", "", "the image's user is root"),
        ("COPY setup.py README.md", "COPY .git README.md", "COPY .git: "),
        (GOOD, "# nothing", "no FROM"),
    ],
)
def test_a_broken_one_is_found(tmp_path, old, new, told):
    assert old in GOOD
    found = problems(tmp_path, GOOD.replace(old, new))
    assert any(told in each for each in found), found


def test_the_ignore_file_counts(tmp_path):
    root = tmp_path / "repository"
    (root / "runs").mkdir(parents=True)
    (root / "a" / "__pycache__").mkdir(parents=True)
    for name in ("runs/x", "a/__pycache__/y.pyc", "a/b.py"):
        (root / name).write_text("")
    shutil.copy(ROOT / ".dockerignore", root)
    path = root / "Dockerfile"
    path.write_text("FROM a:1\nCOPY runs /runs\nCOPY a /a\nUSER 1\n")
    one = checker.Checker(path, root)
    assert one.run() == ["Dockerfile:2: COPY runs: kept out by .dockerignore"]
    assert one.stage.files == {"/a/b.py": "a/b.py"}


@pytest.mark.skipif(shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None, reason="no hadolint")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run([program, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# ------------------------------------------------------------------------------------------------------------------- what is in them
def test_the_gpu_image_has_the_version_that_the_backend_is_tested_with():
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    allowed = next(each for each in versions.requirements(["te"]) if each.name == "transformer-engine").specifier
    pinned = {word.partition("==")[::2] for word in text.split() if word.startswith("transformer-engine") and "==" in word}
    assert len(pinned) == 3
    assert {version for _, version in pinned} == {"2.20.2"}
    assert allowed.contains("2.20.2")
    assert "APEX_CPP_EXT=1 APEX_CUDA_EXT=1" in text
    assert "sha256:" in text


def test_nccl_defaults_don_t_contradict_the_cluster_s():
    lines = [line for line in (ROOT / "docker" / "nccl.conf").read_text(encoding="utf-8").splitlines() if line]
    values = dict(line.split("=") for line in lines if not line.startswith("#"))
    environment = compose(["cluster=h200_4x8"]).cluster.environment
    assert values
    for name, value in values.items():
        assert environment.get(name, value) == value, name
    assert all("=" not in line for line in lines if line.startswith("#")), "older NCCL takes a comment with = for a variable"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "python PROJECT/pretrain_gpt.py\n"),
        (["experiment=a", "run.name=b c"], "python PROJECT/pretrain_gpt.py experiment=a run.name=b c\n"),
        (["--cfg", "job"], "python PROJECT/pretrain_gpt.py --cfg job\n"),
        (["echo", "x=1"], "x=1\n"),
    ],
)
def test_the_entry_point(tmp_path, words, told):
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho python "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "docker" / "entrypoint.sh"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == told.replace("PROJECT", "/opt/megadcp")


# ------------------------------------------------------------------------------------------------------------------------ versions
@pytest.mark.parametrize(
    ("requirement", "version", "fit"),
    [
        ("torch>=2.11,<2.14", "2.13.0a0+8145d630e8.nv26.06", True),
        ("torch>=2.11,<2.14", "2.11.0+cu130", True),
        ("torch>=2.11,<2.14", "2.10.0a0+b4e4ee8", False),
        ("torch>=2.11,<2.14", "2.14.0a0+x", False),
        ("hydra-core==1.3.8", "1.3.7", False),
    ],
)
def test_a_pre_release_counts_as_its_release(requirement, version, fit):
    assert versions.fits(Requirement(requirement), version) is fit


def test_versions_here_fit(capsys):
    assert versions.main([]) == 0
    assert "torch 2." in capsys.readouterr().out


def test_what_is_wrong_is_told(capsys, monkeypatch):
    there = {"torch": "2.10.0a0+b4e4ee8", "numpy": "2.3.5", "rich": "14.0"}
    monkeypatch.setattr(versions, "installed", lambda name: there.get(name, ""))
    assert versions.main(["--missing"]) == 1
    told = capsys.readouterr()
    assert "torch" in told.err
    assert "2.10.0a0+b4e4ee8 is installed" in told.err
    assert told.out == ""
    there["torch"] = "2.13.0a0+8145d630e8.nv26.06"
    assert versions.main(["--missing", "wandb"]) == 0
    told = capsys.readouterr().out.split()
    assert told == ["hydra-core==1.3.8", "sentencepiece>=0.2.0", "safetensors>=0.4.3", "wandb>=0.19"]
    assert versions.main([]) == 1
    assert "hydra-core==1.3.8 is asked for, nothing is installed" in capsys.readouterr().err


def test_extensions_must_be_whole(capsys, monkeypatch):
    there = dict.fromkeys(versions.ENGINE_PARTS, "2.20.2") | {"torch": "2.13.0"}
    monkeypatch.setattr(versions, "installed", lambda name: there.get(name, ""))
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: name)
    assert versions.extension_problems() == []
    there["transformer-engine-torch"] = "2.16.0"
    assert "one version" in versions.extension_problems()[0]
    there |= dict.fromkeys(versions.ENGINE_PARTS, "3.0.0")
    assert "3.0.0 is installed" in versions.extension_problems()[0]
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    assert "amp_C" in versions.extension_problems()[1]

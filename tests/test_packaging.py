"""The outside of the project: what is installed, what importing loads, and whether README, CHANGELOG and CI say what is true."""

import ast
import fnmatch
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megadcp

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEST_COMMAND = 'pip install -e ".[dev]" && pytest'


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tracked() -> list[str]:
    """Files of the repository; outside a clone, all that is not ignored."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    ignored = re.compile(r"(^|/)(\.git|__pycache__|build|dist|runs|datasets|\.venv|[^/]*\.egg-info|\.\w+_cache)/")
    names = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    return sorted(name for name in names if not ignored.search(name))


@pytest.fixture(scope="module")
def metadata() -> dict:
    """The arguments of setup.py's call."""
    code = (
        "import json, sys, setuptools\n"
        "setuptools.setup = lambda **values: print(json.dumps(values))\n"
        f"sys.argv = ['setup.py']; exec(compile(open('setup.py').read(), {str(ROOT / 'setup.py')!r}, 'exec'), "
        f"{{'__file__': {str(ROOT / 'setup.py')!r}, '__name__': '__main__'}})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    import json

    return json.loads(done.stdout)


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower()


def test_extras(metadata: dict) -> None:
    extras = metadata["extras_require"]
    assert set(extras) == {"dev", "wandb", "tensorboard", "hf", "data", "te", "cluster", "docs", "peers"}
    names = {extra: {name_of(each) for each in requirements} for extra, requirements in extras.items()}
    assert names["hf"] == {"tokenizers", "transformers"}
    assert names["data"] == {"pyarrow", "zstandard"}
    assert names["cluster"] == {"submitit", "hydra-submitit-launcher"}
    assert names["dev"] >= {"pytest", "hypothesis", "ruff", "mypy", "import-linter", "scipy"}
    for extra in ("hf", "data", "peers", "tensorboard", "wandb", "cluster", "docs"):
        assert set(extras[extra]) <= set(extras["dev"]), extra
    assert extras["peers"] == ["megatron-core==0.16.1; python_version < '3.12'"]


def test_core_dependencies(metadata: dict) -> None:
    assert {name_of(each) for each in metadata["install_requires"]} == {"torch", "numpy", "hydra-core", "sentencepiece", "safetensors", "rich"}
    assert "torch>=2.11,<2.14" in metadata["install_requires"]
    assert metadata["python_requires"] == ">=3.11,<3.14"
    assert metadata["license"] == "Apache-2.0"
    assert "Apache License" in read("LICENSE")


def test_apex_is_never_listed(metadata: dict) -> None:
    listed = metadata["install_requires"] + [each for requirements in metadata["extras_require"].values() for each in requirements]
    assert "apex" not in {name_of(each) for each in listed}


def test_every_package_is_installed(metadata: dict) -> None:
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in (ROOT / "megadcp").rglob("*.py")}
    assert set(metadata["packages"]) == folders, "a folder without __init__.py would be left out"


def test_versions_agree(metadata: dict) -> None:
    newest = re.search(r"^## \[?([0-9.]+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest[1] == megadcp.__version__ == metadata["version"]


@pytest.mark.parametrize(
    "module", ["megadcp", "megadcp.plan", "megadcp.data", "megadcp.config.check", "megadcp.config.run_file", "megadcp.train.entry"]
)
def test_importing_loads_neither_torch_nor_hydra(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'hydra', 'omegaconf', 'wandb', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_planner_works_with_torch_blocked() -> None:
    modules = [f"megadcp.plan.{path.stem}" for path in (ROOT / "megadcp" / "plan").glob("*.py") if path.stem != "__init__"]
    code = f"import sys; sys.modules.update(torch=None, hydra=None, omegaconf=None)\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(modules) >= 5


def imports_of(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_one_file_knows_hydra() -> None:
    files = [ROOT / name for name in tracked() if name.endswith(".py") and not name.startswith("tests/")]
    knowing = [str(file.relative_to(ROOT)) for file in files if imports_of(file) & {"hydra", "omegaconf"}]
    assert knowing == ["megadcp/config/load.py"]


def test_settings_need_the_standard_library_only() -> None:
    for name in ("schema", "check"):
        assert imports_of(ROOT / f"megadcp/config/{name}.py") <= set(sys.stdlib_module_names) | {"megadcp"}


# ------------------------------------------------------------------------------------------------------------------- texts
def readme_tree() -> dict[str, str]:
    """Path -> description of the file tree in README.md; folders end with /."""
    block = next(part for part in read("README.md").split("```")[1::2] if "pretrain_gpt.py  " in part)
    tree: dict[str, str] = {}
    folders: list[str] = []
    for line in block.strip("\n").splitlines()[1:] if block.startswith("text") else block.strip("\n").splitlines():
        match = re.fullmatch(r"( *)(\S+)\s{2,}(\S.*)", line)
        assert match, f"not a line of the tree: {line!r}"
        depth, name = len(match[1]) // 2, match[2]
        folders = folders[:depth]
        tree["".join(folders) + name] = match[3]
        if name.endswith("/"):
            folders.append(name)
    return tree


def test_readme_tree_lists_what_is_there() -> None:
    """Everything at the top level, in megadcp/ and in tools/ (files named __init__.py excepted)."""
    expected = set()
    for name in tracked():
        parts = name.split("/")
        if parts[-1] in ("__init__.py", ".gitignore"):
            continue
        expected.add(parts[0] + ("/" if len(parts) > 1 else ""))
        if parts[0] in ("megadcp", "tools"):
            expected |= {"/".join(parts[:depth]) + "/" for depth in range(1, len(parts))} | {name}
    listed = {path for path in readme_tree() if path.count("/") - path.endswith("/") == 0 or path.startswith(("megadcp/", "tools/"))}
    assert listed == expected, f"missing in README: {sorted(expected - listed)}; listed but not there: {sorted(listed - expected)}"


def test_readme_tree_has_no_dead_entry() -> None:
    for path in readme_tree():
        assert (ROOT / path).exists(), path


def test_readme_and_ci_run_the_same_command() -> None:
    assert TEST_COMMAND in read("README.md")
    assert "pip install -e . && python pretrain_gpt.py" in read("README.md")
    assert TEST_COMMAND in read(".ci/run")
    assert (ROOT / ".ci/run").stat().st_mode & 0o100, ".ci/run can be executed"


def test_links_of_the_texts_lead_somewhere() -> None:
    for name in tracked():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(name)):
                assert (ROOT / name).parent.joinpath(target).exists(), f"{name} points to {target}"


def test_settings_page_is_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "config_docs.py"), "--check"], check=True)


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"/wor[k]/|/far[m]/|/tmp/ven[v]|/roo[t]/|/hom[e]/\w")
    found = []
    for name in tracked():
        text = (ROOT / name).read_bytes()
        if b"\0" not in text and (match := pattern.search(text.decode("utf-8"))):
            found.append(f"{name}: {match[0]}")
    assert found == []


# ---------------------------------------------------------------------------------------------------------------------- CI
@pytest.fixture
def peers():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("ci_peers", ROOT / ".ci" / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEER_TESTS = """
import pytest
@pytest.mark.peer
def test_runs(): pass
@pytest.mark.peer
@pytest.mark.skipif({skip}, reason="no such package")
def test_may_be_skipped(): pass
def test_other(): pytest.skip("not a peer")
"""


@pytest.mark.parametrize("how", ["runs", "skipped", "module skipped", "none", "no report"])
def test_ci_notices_skipped_peers(peers, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conftest.py").write_text(read("tests/conftest.py"), encoding="utf-8")
    (tmp_path / "test_a.py").write_text(PEER_TESTS.format(skip=how == "skipped") if how != "none" else "def test_x(): pass\n", encoding="utf-8")
    if how == "module skipped":
        (tmp_path / "test_b.py").write_text('import pytest\npytest.importorskip("not_there")\npytestmark = pytest.mark.peer\n', encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = peer\n", encoding="utf-8")
    if how != "no report":
        subprocess.run([sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml"], check=True, capture_output=True)
    code = peers.main(["report.xml"])
    text = capsys.readouterr().out
    assert code == (0 if how == "runs" else 1)
    expected = {
        "runs": "2 comparisons",
        "skipped": "test_may_be_skipped",
        "module skipped": "test_b",
        "none": "no comparison",
        "no report": "missing",
    }
    assert expected[how] in text
    assert "not a peer" not in text


def test_every_folder_of_tests_is_collected(pytestconfig):
    """pytest passes over folders by name, "dist" among them unless it is told otherwise; and two modules of one name can't be loaded."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    passed_over = pytestconfig.getini("norecursedirs")
    for folder in {part for file in files for part in file.relative_to(ROOT).parts[:-1]}:
        assert not any(fnmatch.fnmatch(folder, pattern) for pattern in passed_over), folder
    names = [file.name for file in files]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})

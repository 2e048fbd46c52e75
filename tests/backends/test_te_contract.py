"""What the backend calls of Transformer Engine exists there, with these parameters: recorded from 2.20.2, and compared with the source where it is.

The source is read, never imported: it needs libraries of a GPU. It is found where the package is installed (its Python part is enough), or in the
folder that MEGADCP_TE_SOURCE names: pip install --no-deps --target FOLDER transformer-engine==2.20.2
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
import te_fake
from te_fake import SIGNATURES, signature

from megadcp.backends import te_attention, te_backend, te_modules, te_probe
from megadcp.data.batch import Pack, split_for_lanes
from megadcp.mesh.coords import zigzag_spans

BACKENDS = Path(te_backend.__file__).parent
SYMBOLS = SIGNATURES["symbols"]


# ------------------------------------------------------------------------------------------------------------- recorded
def used(attribute: str) -> set[str]:
    """Names that the backend's files take from Transformer Engine's module te.ATTRIBUTE (a local variable of that value among them)."""
    found = set()
    for path in [*BACKENDS.glob("te_*.py"), BACKENDS / "choose.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(f"te.{attribute}"):
                found.add(node.attr)
            local = path.name == "te_modules.py" and attribute == "pytorch"  # te, weight = self._tools.te.pytorch, ...
            if local and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "te":
                found.add(node.attr)
    return found


def test_every_name_that_is_used_is_recorded():
    recorded = {name.split(".")[1] for name in SYMBOLS if name.startswith("pytorch.")}
    assert used("pytorch") == recorded
    assert {f"recipe.{name}" for name in te_backend.RECIPES.values()} == {name for name in SYMBOLS if name.startswith("recipe.")}


def test_only_one_function_imports_it():
    places = []
    for path in (BACKENDS.parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(name.startswith("transformer_engine") for name in names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module" and "PACKAGE" in ast.unparse(node):
                places.append(path.name)
    assert set(places) == {"te_probe.py"}


def test_keywords_of_linears_bind():
    """What is passed by ** is bound here; all other calls bind in every test that uses the stand-in."""
    tools = te_modules.Tools(None, None, True, None, 1, None)
    for symbol in ("pytorch.Linear.__init__", "pytorch.LayerNormLinear.__init__"):
        signature(symbol).bind(32, 64, **tools.parallel("column"))
    with pytest.raises(TypeError):
        signature("pytorch.Linear.__init__").bind(32, 64, hidden_size=3)
    with pytest.raises(TypeError):
        signature("pytorch.DotProductAttention.set_context_parallel_group").bind(None)


def test_the_stand_in_has_the_recorded_names_and_no_others():
    te = te_fake.make(te_fake.Recorder())
    assert set(vars(te.pytorch)) == {name.split(".")[1] for name in SYMBOLS if name.startswith("pytorch.")}
    assert set(vars(te.recipe)) >= set(te_backend.RECIPES.values())


def test_the_tested_range_ends_with_what_was_recorded():
    assert tuple(int(part) for part in SIGNATURES["version"].split(".")) == te_probe.NEWEST
    assert f"=={SIGNATURES['version']}" in te_probe.INSTALL


# --------------------------------------------------------------------------------------------------------------- source
def source() -> Path:
    """The package's folder, of the recorded version; skips the test without one."""
    folder = os.environ.get("MEGADCP_TE_SOURCE")
    if folder:
        named = [path.name for path in Path(folder).glob("transformer_engine-*.dist-info")]
        found, package = (named[0].split("-")[1].removesuffix(".dist") if named else ""), Path(folder) / "transformer_engine"
        assert package.is_dir(), f"MEGADCP_TE_SOURCE={folder} holds no transformer_engine"
    else:
        spec = importlib.util.find_spec("transformer_engine")
        if spec is None or spec.origin is None:
            pytest.skip("Transformer Engine's source is not here")
        package = Path(spec.origin).parent
        try:
            found = version("transformer_engine")
        except PackageNotFoundError:
            found = ""
    if re.match(r"[0-9.]*[0-9]", found) is None or found.split("+")[0] != SIGNATURES["version"]:
        pytest.skip(f"Transformer Engine {found} is here, recorded is {SIGNATURES['version']}")
    return package


def parsed(file: str) -> ast.Module:
    return ast.parse((source() / file).read_text(encoding="utf-8"))


def node_at(tree: ast.AST, place: str) -> ast.AST:
    """A class or function by its dotted name."""
    for name in place.split("."):
        tree = next(each for each in ast.walk(tree) if isinstance(each, (ast.ClassDef, ast.FunctionDef)) and each.name == name)
    return tree


def parameters(function: ast.FunctionDef) -> list[str]:
    """As they are recorded: `name`, `name=`, `*name`, `**name`, and `*` before keyword-only ones."""
    own = function.args
    places = own.posonlyargs + own.args
    found = [each.arg + "=" * (index >= len(places) - len(own.defaults)) for index, each in enumerate(places)]
    if own.vararg:
        found.append(f"*{own.vararg.arg}")
    elif own.kwonlyargs:
        found.append("*")
    found += [each.arg + "=" * (default is not None) for each, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)]
    if own.kwarg:
        found.append(f"**{own.kwarg.arg}")
    return [each for each in found if each != "self"]


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_recorded_signatures_are_those_of_the_source(symbol):
    recorded = SYMBOLS[symbol]
    node = node_at(parsed(recorded["file"]), recorded["place"])
    if "fields" in recorded:
        assert [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)] == recorded["fields"]
    elif "popped" in recorded:
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and ast.unparse(each.func) == "kwargs.pop"]
        assert [each.args[0].value for each in calls] == recorded["popped"]
    else:
        assert parameters(node) == recorded["parameters"]


def test_names_are_public():
    exported = {each.name for node in parsed("pytorch/__init__.py").body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert {name.split(".")[1] for name in SYMBOLS if name.startswith("pytorch.")} <= exported


@pytest.mark.parametrize(("file", "place", "reads"), [
    ("pytorch/module/linear.py", "Linear.forward", ["self.fuse_wgrad_accumulation", "self.save_original_input"]),
    ("pytorch/module/layernorm_linear.py", "LayerNormLinear.forward", ["self.fuse_wgrad_accumulation"]),
    ("pytorch/attention/dot_product_attention/dot_product_attention.py", "DotProductAttention.forward",
     ["self.cp_group", "self.cp_global_ranks", "self.cp_stream", "self.cp_comm_type"]),
])  # fmt: skip
def test_attributes_are_read_by_each_forward(file, place, reads):
    """What this backend sets between calls takes effect in the next one."""
    text = {ast.unparse(each) for each in ast.walk(node_at(parsed(file), place)) if isinstance(each, ast.Attribute)}
    assert set(reads) <= text


def test_gradients_that_go_to_main_grad_are_told_in_the_same_way():
    for file in ("pytorch/module/linear.py", "pytorch/module/layernorm_linear.py"):
        text = (source() / file).read_text(encoding="utf-8")
        assert "grad_added_to_main_grad = True" in text
        assert "weight.main_grad" in text


def test_a_meta_device_defers_initial_values():
    """Modules are made without memory; what is asked is the string."""
    for file in ("pytorch/module/linear.py", "pytorch/module/layernorm_linear.py"):
        assert "reset_parameters(defer_init=device == 'meta')" in ast.unparse(parsed(file))


# --------------------------------------------------------------------------------------------------------------- zigzag
# Rows of each member, from the published tables: 2 P chunks of each document, chunk r and then chunk 2 P - 1 - r.
GOLDEN = [
    ([8, 4], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
    ([12], 2, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
    ([8, 16], 4, [[0, 7, 8, 9, 22, 23], [1, 6, 10, 11, 20, 21], [2, 5, 12, 13, 18, 19], [3, 4, 14, 15, 16, 17]]),
]


@pytest.mark.parametrize(("padded", "cp", "rows"), GOLDEN)
def test_golden_rows(padded, cp, rows):
    for index in range(cp):
        mine = [row for start, stop in zigzag_spans(padded, cp, index) for row in range(start, stop)]
        assert mine == rows[index]
        assert te_fake._rows(np.cumsum([0, *padded]).tolist(), cp, index).tolist() == rows[index]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_loader_cuts_packs_as_attention_expects(cp):
    """The closed form of the partitioned indices, for random packs."""
    rng = np.random.default_rng(cp)
    for _ in range(20):
        padded = (rng.integers(1, 9, rng.integers(1, 6)) * 2 * cp).tolist()
        borders = np.cumsum([0, *padded])
        total = int(borders[-1])
        names = {"tokens": np.arange(total), "labels": np.arange(total), "positions": np.arange(total), "cu_seqlens": borders.astype(np.int32)}
        fields = {"max_length": max(padded), "document_ids": np.arange(len(padded)), "real_lengths": np.array(padded)}
        known = {**names, **fields, "cu_seqlens_list": tuple(borders.tolist())}
        pack = Pack(**known, **({"real_lengths_list": tuple(padded)} if "real_lengths_list" in inspect.signature(Pack).parameters else {}))
        for index, share in enumerate(split_for_lanes(pack, cp)):
            assert share.tokens.tolist() == te_fake._rows(borders.tolist(), cp, index).tolist()
            assert (np.asarray(share.cu_seqlens_list) * cp).tolist() == borders.tolist()


def test_kinds_have_the_engines_names():
    assert te_attention.COMMUNICATION == {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "2d": "a2a+p2p"}

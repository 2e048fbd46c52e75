import subprocess
import sys

BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is not needed here")
sys.meta_path.insert(0, Refuse())
"""
PLAN = [
    "actions",
    "ahead",
    "balance",
    "baseline_layouts",
    "baseline_megatron",
    "baselines",
    "basis",
    "bound_1f1b",
    "columns",
    "cost",
    "exact",
    "exact_lanes",
    "exact_pipelines",
    "figures",
    "fit",
    "fitted_planner",
    "lanes",
    "limits",
    "lower_bound",
    "memory",
    "packing",
    "pipeline_attempts",
    "pipeline_costs",
    "pipeline_fallback",
    "pipeline_fill",
    "pipeline_memory",
    "pipeline_profile",
    "pipeline_reshape",
    "pipeline_score",
    "pipelines",
    "plan_file",
    "planner",
    "presets",
    "pricing",
    "render",
    "render_common",
    "render_lengths",
    "render_svg",
    "render_text",
    "render_theme",
    "render_trace",
    "report",
    "simulate",
    "step_plan",
    "verify",
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_plan_works_without_torch():
    code = BLOCK.format(blocked=["torch", "hydra", "omegaconf"]) + "".join(f"import megadcp.plan.{name}\n" for name in PLAN)
    code += "import sys; sys.path.insert(0, 'tests/plan'); import test_planner as t; megadcp.plan.verify.verify(t.planner()(0, [5, 6]))"
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert run(BLOCK.format(blocked=["torch"]) + "import torch").returncode == 1  # the block works


def test_what_imports_load():
    for name in ("megadcp", "megadcp.plan", "megadcp.data", *(f"megadcp.plan.{part}" for part in PLAN)):
        result = run(f"import sys, {name}; print([x for x in ('torch', 'hydra', 'omegaconf') if x in sys.modules])")
        assert result.stdout.strip() == "[]", (name, result.stdout, result.stderr)


def test_the_list_of_modules_is_complete():
    import pkgutil

    import megadcp.plan

    assert sorted(module.name for module in pkgutil.iter_modules(megadcp.plan.__path__)) == PLAN

"""Does what is installed fit setup.py? Run while an image is built: the image's own torch stays, so pip is never asked to resolve it.

    python docker/versions.py                        every requirement of setup.py is met; exit code 1 and one line each where not
    python docker/versions.py --missing wandb hf     the same, but prints what is absent, of these extras too, as a requirements file
    python docker/versions.py --extensions           Transformer Engine and NVIDIA's apex are there as well, whole and of the right version

A pre-release counts as its release: 2.13.0a0 of an image is inside torch>=2.11,<2.14. Needs setuptools and packaging.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
ENGINE_PARTS = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
APEX_MODULES = ("amp_C", "fused_weight_gradient_mlp_cuda")  # by these apex is recognised, never by its name


def requirements(extras: Sequence[str]) -> list[Requirement]:
    """What setup.py asks for, with these extras, where this Python runs."""
    import setuptools  # noqa: F401 - first: it brings the distutils that the next line imports

    from distutils.core import run_setup  # isort: skip

    before = os.getcwd()
    os.chdir(ROOT)
    try:
        project = run_setup("setup.py", stop_after="init")
    finally:
        os.chdir(before)
    unknown = [extra for extra in extras if extra not in project.extras_require]
    if unknown:
        sys.exit(f"error: no extra {unknown[0]} in setup.py; legal here: {', '.join(sorted(project.extras_require))}")
    texts = [*project.install_requires, *(text for extra in extras for text in project.extras_require[extra])]
    found = [Requirement(text) for text in texts]
    return [each for each in found if each.marker is None or each.marker.evaluate()]


def installed(name: str) -> str:
    """Version of a distribution, empty if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def fits(requirement: Requirement, version: str) -> bool:
    """Whether a version is inside; of a pre-release its release counts, and what a build appends to it does not."""
    return requirement.specifier.contains(Version(version).base_version)


def problems(wanted: Sequence[Requirement], absent_is_wrong: bool) -> list[str]:
    """One line for each requirement that what is installed does not meet."""
    found = []
    for each in wanted:
        version = installed(each.name)
        if (version and not fits(each, version)) or (absent_is_wrong and not version):
            found.append(f"{each} is asked for, {version or 'nothing'} is installed")
    return found


def extension_problems() -> list[str]:
    """The same for what has kernels of its own."""
    allowed = next(each for each in requirements(["te"]) if each.name == "transformer-engine")
    versions = {name: installed(name) for name in ENGINE_PARTS}
    found = []
    if len(set(versions.values())) > 1 or not all(versions.values()):
        told = ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items())
        found.append(f"the parts of Transformer Engine must have one version: {told}")
    elif not fits(allowed, versions[ENGINE_PARTS[0]]):
        found.append(f"transformer-engine{allowed.specifier} is asked for, {versions[ENGINE_PARTS[0]]} is installed")
    found += [
        f"NVIDIA's apex lacks {module}: it was built without APEX_CUDA_EXT=1" for module in APEX_MODULES if not importlib.util.find_spec(module)
    ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of setup.py")
    parser.add_argument("--missing", action="store_true", help="print what is absent, and only what is there counts")
    parser.add_argument("--extensions", action="store_true", help="Transformer Engine and apex too")
    asked = parser.parse_args(argv)
    wanted = requirements(asked.extras)
    found = problems(wanted, not asked.missing) + (extension_problems() if asked.extensions else [])
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    if asked.missing and not found:
        # pip reads these lines: markers have been judged, and torch is the image's affair
        print("\n".join(re.sub(r"\s*;.*", "", str(each)) for each in wanted if not installed(each.name) and each.name != "torch"))
    if not installed("torch"):
        print("error: there is no torch; start from an image that has one", file=sys.stderr)
        return 1
    if not asked.missing and not found:
        print(f"versions fit: Python {sys.version.split()[0]}, " + ", ".join(f"{each.name} {installed(each.name)}" for each in wanted))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

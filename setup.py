"""Installs ddiloco; ranges are what it was tested with. `pip install -e .[dev]` to develop."""

from pathlib import Path

from setuptools import find_packages, setup

TEST = [
  "pytest>=8",
  "pytest-timeout>=2.3",
  "pytest-xdist>=3.7",  # many tests wait more than they compute
  "hypothesis>=6.100",
  "sentencepiece>=0.2",
  "tokenizers>=0.20",
  "ray>=2.40,<3",  # its engine is tested like the others
]

setup(
  name="ddiloco",
  version="0.1.0",
  description="Decoupled DiLoCo in JAX: one model trained across islands, far apart and failing",
  long_description=Path(__file__).with_name("README.md").read_text(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["ddiloco", "ddiloco.*"]),
  package_data={"ddiloco.observe": ["page/*"]},  # the dashboard
  install_requires=[
    "absl-py>=2.1",  # flags of the command line
    "etils[epath]>=1.7",  # checkpoints on disks and in buckets by the same code
    "flax>=0.12,<0.13",  # NNX models
    "fsspec>=2024.6",  # what epath speaks to buckets with
    "grain>=0.2.11,<0.3",  # index-addressed data
    "jax>=0.10,<0.11",
    "matplotlib>=3.8,<4",  # the report's pictures
    "ml_collections>=1.0,<2",  # experiment files
    "ml_dtypes>=0.5",  # bf16 on the host
    "msgpack>=1.0,<2",  # message headers
    "numpy>=2.0,<3",
    "optax>=0.2.5,<0.3",  # inner optimizer
    "orbax-checkpoint>=0.11.25,<0.13",
    "pyzmq>=26,<28",  # queues between processes
    "rich>=13,<16",  # live terminal view
    "setproctitle>=1.3,<2",  # forked roles have their own names in `ps`
    "safetensors>=0.6,<0.9",  # weights in and out, as NumPy arrays
    "tensorboardX>=2.6.2,<3",  # scalars for TensorBoard, without TensorFlow
  ],
  extras_require={
    "test": TEST,
    "ray": ["ray>=2.40,<3"],
    "fuzz": ["atheris>=2.3"],
    "tokenizers": ["sentencepiece>=0.2", "tokenizers>=0.20"],
    "gcs": ["etils[epath-gcs]>=1.7"],  # checkpoints in gs://
    "tpu": ["jax[tpu]>=0.10,<0.11"],
    "dev": [*TEST, "ruff>=0.15", "mypy>=1.15", "pre-commit>=4"],
  },
  entry_points={"console_scripts": ["ddiloco = ddiloco.cli:entry"]},
)

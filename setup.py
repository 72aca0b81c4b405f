from setuptools import find_packages, setup

setup(
  name='gqa',
  version='0.1.0',
  description='Train, convert, decode and measure language models with any '
  'number of key/value heads, in JAX',
  packages=find_packages(include=['gqa', 'gqa.*']),
  python_requires='>=3.11',
  install_requires=[
    'absl-py>=2.1',
    'flax>=0.12.8,!=0.12.11',
    'grain>=0.2.18',
    'jax>=0.10',
    'matplotlib>=3.9',
    'ml-collections>=1.1',
    'ml-dtypes>=0.5',
    'numpy>=2.0',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12,<1',
    'tensorboard>=2.20',
    'tokenizers>=0.22',
    'tqdm>=4.66',
  ],
  extras_require={
    'dev': [
      'hypothesis>=6.100',
      'pytest>=8',
      'pytest-xdist>=3.6',
      'ruff>=0.9',
      'safetensors>=0.5',
    ],
    'peers': ['torch>=2.9', 'transformers>=5'],
    'datasets': ['datasets>=4'],
    'gguf': ['gguf>=0.17'],
    'gpu': ['jax[cuda12]>=0.10'],
    'tpu': ['jax[tpu]>=0.10'],
  },
)

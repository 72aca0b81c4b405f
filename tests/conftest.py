"""Eight fake CPU devices, and no silent broadcasting across ranks."""

import atexit
import shutil
import tempfile

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# A program that several tests need is compiled once in a session.
_cache = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
jax.config.update('jax_compilation_cache_dir', _cache)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)

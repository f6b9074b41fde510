"""JAX's persistent compilation cache, placed in the user's cache folder."""

import functools
import logging
import os
from pathlib import Path

from gemma_jax import env

logger = logging.getLogger(__name__)


def enable_compilation_cache() -> Path | None:
    """Keep compiled programs on disk, so that the next process loads them; return the folder.

    The folder is `xla/` in GEMMA_JAX_CACHE_DIR. A folder that was already given to JAX itself
    (JAX_COMPILATION_CACHE_DIR or `jax.config`) is left as it is, with its limits. None means
    that nothing is kept: the cache is off, or its folder cannot be written (logged once).

    Raises:
      ConfigError: GEMMA_JAX_CACHE_DIR does not parse.
    """
    import jax

    configured = jax.config.jax_compilation_cache_dir
    if configured:
        return Path(configured)
    root = env.CACHE_DIR.read()
    if root is None:
        return None
    folder = root / "xla"
    if not _is_writable(folder):
        return None
    # A decode program that takes 0.2 s to compile still costs more than its file does.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


@functools.cache
def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        logger.warning(
            "no compilation cache: %s cannot be written (%s); every start compiles again. "
            "Set %s to a writable folder, or to 'off'.",
            folder,
            error.strerror or error,
            env.CACHE_DIR.name,
        )
        return False
    return True

"""Thread counts of numeric libraries in forked processes.

The libraries read OMP_NUM_THREADS and similar variables when they are loaded. A zygote loads them with one thread,
because a process with threads cannot be forked safely. So each fork sets the counts that its own environment names.
"""

from __future__ import annotations

import os

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# Key: part of the file's name. Values: the variables that it obeys, the first set one wins; and its setter function,
# under its names in various builds. Source: the libraries' documentation and `nm -D`.
_LIBRARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "openblas": (
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"),
        (
            *("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"),
            *("openblas_set_num_threads64_", "openblas_set_num_threads"),
        ),
    ),
    "libmkl_rt": (("MKL_NUM_THREADS", "OMP_NUM_THREADS"), ("MKL_Set_Num_Threads",)),
    "libgomp": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    "libomp": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
    "libiomp5": (("OMP_NUM_THREADS",), ("omp_set_num_threads",)),
}


def limit_threads(env: dict[str, str], count: int) -> tuple[str, ...]:
    """Set the thread variables that are missing in `env` to `count`, at least 1, and return their names.

    OMP_NUM_THREADS counts for the others too: all libraries obey it where their own variable is missing.
    """
    if _VARIABLES[0] in env:
        return ()
    names = tuple(name for name in _VARIABLES if name not in env)
    env.update(dict.fromkeys(names, str(max(1, count))))
    return names


def apply_thread_counts() -> None:
    """Set the loaded libraries' thread counts from `os.environ`; all cores if no variable is set."""
    for path in _loaded():
        name = os.path.basename(path)
        for part, (variables, functions) in _LIBRARIES.items():
            if part in name:
                _set(path, functions, _count(variables))


def _count(variables: tuple[str, ...]) -> int:
    for variable in variables:
        text = os.environ.get(variable, "").partition(",")[0]  # OpenMP lists one number per level of nesting
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loaded() -> set[str]:
    """Return the paths of the shared libraries in this process; empty without /proc, where nothing is forked."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if ".so" in line}
    except FileNotFoundError:
        return set()
    return {path for path in paths if path.startswith("/")}


def _set(path: str, functions: tuple[str, ...], count: int) -> None:
    import ctypes  # only here: the client imports this module too

    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    for name in functions:
        function = getattr(library, name, None)
        if function is not None:
            function(ctypes.c_int(count))
            return

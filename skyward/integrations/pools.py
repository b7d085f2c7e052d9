"""Pools that joblib and scikit-learn run on for the length of a `with` block."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from types import TracebackType
from typing import Any, ClassVar

from ..core.signatures import checked_options
from ..pool.pool import ComputePool
from ..providers.base import Provider
from ..values.image import DEFAULT_IMAGE, Image
from ..values.nodes import Nodes

_RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


@checked_options
class JoblibPool(contextlib.AbstractContextManager[ComputePool]):
    """`ComputePool` on which every `joblib.Parallel` call inside the block runs.

    Entering it returns the pool. Leaving it closes the pool and restores joblib's previous backend. It can be entered
    once.

    Args:
        provider: where machines come from, such as `sky.Local()`.
        nodes: number of nodes, as in `ComputePool`.
        concurrency: slots per node, as in `ComputePool`. `n_jobs=-1` means nodes x concurrency.
        image: image of the nodes. If the provider installs packages, joblib is added to its `pip`.
        joblib_version: release of joblib on the nodes. None: the release that is installed here.
        retries: how often a batch of calls may run again after its node or slot was lost, >= 0.
        options: other options of `ComputePool`.

    Raises:
        UsageError: an argument is out of range.
        ProviderError: on entering: the provider cannot deliver the machines.

    Example:
        >>> import skyward as sky
        >>> from joblib import Parallel, delayed
        >>> with JoblibPool(sky.Local(), nodes=2):
        ...     Parallel(n_jobs=-1)(delayed(abs)(-i) for i in range(3))
        [0, 1, 2]
    """

    _packages: ClassVar[tuple[str, ...]] = ("joblib",)
    _preload: ClassVar[tuple[str, ...]] = ("skyward.integrations.joblib_batch",)

    def __init__(
        self,
        provider: Provider,
        *,
        nodes: int | tuple[int, int] | Nodes = 1,
        concurrency: int = 1,
        image: Image | None = None,
        joblib_version: str | None = None,
        retries: int = 0,
        **options: Any,
    ) -> None:
        versions = {"joblib": joblib_version}
        self._open(provider, image, versions, retries, nodes=nodes, concurrency=concurrency, **options)

    def _open(
        self, provider: Provider, image: Image | None, versions: dict[str, str | None], retries: int, **options: Any
    ) -> None:
        image = image or DEFAULT_IMAGE
        # Only if it has an effect: other providers would warn about packages that the user never asked for.
        if "pip" in getattr(provider, "acts_on_image", ()):
            image = image.with_pip(*(_requirement(name, versions.get(name)) for name in self._packages))
        options["preload"] = (*self._preload, *options.get("preload", ()))
        self._retries = retries
        self._pool = ComputePool(provider, image=image, **options)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ComputePool:
        # Imported here, so that this module can be imported, and can explain itself, on a machine without joblib.
        from .joblib import joblib_backend

        with contextlib.ExitStack() as stack:
            backend = joblib_backend(self._pool, retries=self._retries)
            stack.enter_context(self._pool)
            stack.enter_context(backend)
            self._stack = stack.pop_all()
        return self._pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._pool!r}>"


@checked_options
class ScikitLearnPool(JoblibPool):
    """`ComputePool` for scikit-learn: searches and estimators with `n_jobs=None` or -1 run on all its slots.

    It is a `JoblibPool` that also adds scikit-learn to the image.

    Args:
        provider: where machines come from, such as `sky.Local()`.
        nodes: number of nodes, as in `ComputePool`.
        concurrency: slots per node, as in `ComputePool`. `n_jobs=-1` means nodes x concurrency.
        image: image of the nodes. If the provider installs packages, scikit-learn and joblib are added to its `pip`.
        sklearn_version: release of scikit-learn on the nodes. None: the release that is installed here. Estimators
            travel only between equal releases.
        joblib_version: release of joblib on the nodes. None: the release that is installed here.
        retries: how often a batch of calls may run again after its node or slot was lost, >= 0.
        options: other options of `ComputePool`.

    Raises:
        UsageError: an argument is out of range.
        ProviderError: on entering: the provider cannot deliver the machines.

    Example:
        >>> import skyward as sky
        >>> with ScikitLearnPool(sky.Local(), nodes=2, concurrency=2):  # doctest: +SKIP
        ...     GridSearchCV(SVC(), {"C": [1, 10]}).fit(X, y)
    """

    _packages: ClassVar[tuple[str, ...]] = ("scikit-learn", "joblib")
    # These import most of the rest; an estimator's own module is small in comparison.
    _preload: ClassVar[tuple[str, ...]] = (
        *JoblibPool._preload,
        "sklearn.model_selection",
        "sklearn.ensemble",
        "sklearn.pipeline",
    )

    def __init__(
        self,
        provider: Provider,
        *,
        nodes: int | tuple[int, int] | Nodes = 1,
        concurrency: int = 1,
        image: Image | None = None,
        sklearn_version: str | None = None,
        joblib_version: str | None = None,
        retries: int = 0,
        **options: Any,
    ) -> None:
        versions = {"scikit-learn": sklearn_version, "joblib": joblib_version}
        self._open(provider, image, versions, retries, nodes=nodes, concurrency=concurrency, **options)


def _requirement(package: str, version: str | None) -> str:
    """Pin `package` to `version`, or to the installed release if an index can have that one."""
    if version is None:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return package
        if not _RELEASE.fullmatch(version):
            return package  # built from source
    return f"{package}=={version}"

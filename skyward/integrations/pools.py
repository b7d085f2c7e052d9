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

__all__ = ["JoblibPool", "ScikitLearnPool"]

_RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


@checked_options
class JoblibPool(contextlib.AbstractContextManager[ComputePool]):
    """A `ComputePool` that every `joblib.Parallel` call inside the block runs on. Entering it gives the pool.

    The default backend of joblib is back when the block is left. Usable once.

    Args:
        provider: where machines come from: `sky.Local()`.
        nodes, concurrency: as for ComputePool; `n_jobs=-1` is nodes x concurrency.
        image: of the nodes; joblib is added to its `pip` where the provider installs packages, everything else stays.
        joblib_version: the release of joblib on the nodes; None: the one that is installed here.
        retries: how often a batch of calls may be run again after the loss of its node or slot, >= 0.
        options: the other options of ComputePool.

    Raises:
        UsageError: a field is out of its range.
        ProviderError: on entering, when the machines cannot be had.

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
        nodes: int = 1,
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
        # Only where it has an effect: a provider that installs nothing would warn about what the user never asked for.
        if "pip" in getattr(provider, "acts_on_image", ()):
            image = image.with_pip(*(_requirement(name, versions.get(name)) for name in self._packages))
        options["preload"] = (*self._preload, *options.get("preload", ()))
        self._retries = retries
        self._pool = ComputePool(provider, image=image, **options)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ComputePool:
        # Not at the top: on a machine without joblib this module still explains itself.
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
    """A `ComputePool` for scikit-learn: searches and estimators with `n_jobs=None` or -1 run on all its slots.

    As `JoblibPool`, with scikit-learn added to the image too.

    Args:
        sklearn_version: the release of scikit-learn on the nodes; None: the one that is installed here. Estimators
            cross between equal releases only.

    Example:
        >>> import skyward as sky
        >>> with ScikitLearnPool(sky.Local(), nodes=2, concurrency=2):  # doctest: +SKIP
        ...     GridSearchCV(SVC(), {"C": [1, 10]}).fit(X, y)
    """

    _packages: ClassVar[tuple[str, ...]] = ("scikit-learn", "joblib")
    # What imports most of the rest; an estimator's own module is small beside it.
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
        nodes: int = 1,
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
    """That release, or the one that is installed here if an index can have it."""
    if version is None:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return package
        if not _RELEASE.fullmatch(version):
            return package  # built from source
    return f"{package}=={version}"

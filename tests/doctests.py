"""The examples in a module's docstrings."""

from __future__ import annotations

import doctest
from types import ModuleType


def run_examples(module: ModuleType) -> int:
    """Run the examples of a module and of its public names, and return how many there are. Raises AssertionError.

    `doctest.testmod` passes classes and functions over that report their public module instead of this one.
    """
    objects = {module.__name__: module, **{name: getattr(module, name) for name in module.__all__}}
    runner = doctest.DocTestRunner()
    for name, value in objects.items():
        if value is module:
            tests = doctest.DocTestFinder(recurse=False).find(value, name)
        else:
            tests = doctest.DocTestFinder().find(value, name, module=False, globs=dict(vars(module)))
        for test in tests:
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries > 0, f"{module.__name__} has no examples"
    return runner.tries

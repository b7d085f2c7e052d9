"""The examples in a module's docstrings."""

from __future__ import annotations

import ast
import doctest
import inspect
from types import ModuleType


def documented_names(module: ModuleType) -> set[str]:
    """Return what a package exports, or what a module defines."""
    if hasattr(module, "__path__"):
        return set(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def run_examples(module: ModuleType) -> int:
    """Run the examples of a module and of the objects that it defines or exports. Return the number of examples.

    `doctest.testmod` skips classes and functions that report their public module instead of this one.
    """
    own = documented_names(module)
    objects = {module.__name__: module, **{name: value for name, value in vars(module).items() if name in own}}
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

"""Texts that a message can have: each way through its expression, with `{}` for every value.

    raise UsageError(f"nodes={nodes}: {problem}")

`problem` may be a variable, a parameter or the value of a function. This reader follows it to its literals, within the
file: to the assignments of the variable, the arguments of the callers, and the returned expressions.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice, product

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_VALUE = "{}"
_MOST = 64  # texts of one message


class MessageTexts:
    """Reader of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self._parents: dict[ast.AST, ast.AST] = {}
        self._functions: dict[str, list[_Function]] = defaultdict(list)
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # it grows meanwhile
            children = list(ast.iter_child_nodes(node))
            self._parents.update(dict.fromkeys(children, node))
            nodes += children
            if isinstance(node, _Function):
                self._functions[node.name].append(node)
            elif isinstance(node, ast.Call):
                self.calls[name_of(node.func)].append(node)
        self._tree = tree

    def of(self, expression: ast.expr, seen: tuple[tuple[str, str], ...] = ()) -> list[str]:
        """Return the texts of an expression, without duplicates. `seen`: names that are being followed."""
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, seen)
            case ast.FormattedValue(value=value, conversion=-1):
                return self.of(value, seen)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], seen)
            case ast.IfExp(body=body, orelse=orelse):
                return self._any([body, orelse], seen)
            case ast.BoolOp(values=values):
                return self._any(values, seen)
            case ast.Name(id=name):
                key = (self._scope(expression), name)
                return [_VALUE] if key in seen else self._any(self._values(expression), (*seen, key))
            case ast.Call(func=function) if ("", name_of(function)) not in seen:
                name = name_of(function)
                returned = (value for made in self._functions[name] for value in self._returned(made))
                return self._any(returned, (*seen, ("", name)))
        return [_VALUE]

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def _joined(self, parts: Iterable[ast.expr], seen: tuple[tuple[str, str], ...]) -> list[str]:
        ways = product(*(self.of(part, seen) for part in parts))
        return list(dict.fromkeys("".join(way) for way in islice(ways, _MOST)))

    def _any(self, expressions: Iterable[ast.expr], seen: tuple[tuple[str, str], ...]) -> list[str]:
        texts = dict.fromkeys(text for expression in expressions for text in self.of(expression, seen))
        return list(islice(texts, _MOST)) or [_VALUE]

    def _function(self, node: ast.AST) -> _Function | None:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, _Function):
                return node
        return None

    def _scope(self, node: ast.AST) -> str:
        function = self._function(node)
        return "" if function is None else function.name

    def _returned(self, function: _Function) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None and self._function(node) is function:
                yield node.value

    def _values(self, name: ast.Name) -> list[ast.expr]:
        """Return the expressions whose value a name may have: nothing if only a run of the program can tell."""
        function = self._function(name)
        assigned = [] if function is None else list(_assigned(function, name.id))
        if function is not None and not assigned and name.id in _parameters(function):
            return list(self._arguments(function, name.id))
        return assigned or list(_assigned(self._tree, name.id, everywhere=False))

    def _arguments(self, function: _Function, name: str) -> Iterator[ast.expr]:
        """Iterate over what the callers in this file pass as a parameter."""
        positional = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        default = _parameters(function)[name]
        for call in self.calls[function.name]:
            at = positional.index(name) if name in positional else len(call.args)
            passed = call.args[at] if at < len(call.args) else None
            passed = next((keyword.value for keyword in call.keywords if keyword.arg == name), passed) or default
            if passed is not None:
                yield passed


def name_of(function: ast.expr) -> str:
    """Return the last part of a function's name: `error` of `self.error(...)`; "" if it has none."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _assigned(node: ast.AST, name: str, *, everywhere: bool = True) -> Iterator[ast.expr]:
    for statement in ast.walk(node) if everywhere else ast.iter_child_nodes(node):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for element, value in zip(targets, values, strict=False):
                    if isinstance(element, ast.Name) and element.id == name:
                        yield value


def _parameters(function: _Function) -> dict[str, ast.expr | None]:
    """Return the parameters with their defaults."""
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    without = len(positional) - len(given.defaults)
    defaults: dict[str, ast.expr | None] = dict.fromkeys(positional[:without])
    defaults |= dict(zip(positional[without:], given.defaults, strict=True))
    return defaults | dict(zip((argument.arg for argument in given.kwonlyargs), given.kw_defaults, strict=True))

"""Search grammar of MLflow: `entity.key operator value`, joined by AND, and `entity.key [ASC|DESC]` to order by.

Parsing takes time that grows with the length of the text only, and the text has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .refusal import Reason, Refusal

FILTER_LENGTH = 20_000
CLAUSES = 100
PATTERN_LENGTH, WILDCARDS = 1_000, 16
"""Limits of a LIKE pattern. Matching one costs up to the product of both for each row."""


class Entity(StrEnum):
    """Kind of a thing that a search compares."""

    ATTRIBUTE = "attribute"
    METRIC = "metric"
    PARAM = "param"
    TAG = "tag"
    DATASET = "dataset"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One clause of a filter.

    Attributes:
        entity: Kind of the left side.
        key: Name of the metric, parameter or tag; canonical name of the attribute.
        operator: `=`, `!=`, `>`, `>=`, `<`, `<=`, `LIKE`, `ILIKE`, `IN`, `NOT IN`, `IS NULL` or `IS NOT NULL`.
        value: Number, text, list of texts for IN, None for IS NULL.
    """

    entity: Entity
    key: str
    operator: str
    value: float | int | str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Order:
    """One key to order by."""

    entity: Entity
    key: str
    is_descending: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """Names that one kind of list can be searched by.

    Attributes:
        numbers: Numeric attributes: each spelling with its canonical name.
        texts: Text attributes, likewise.
        lists: Canonical names of the text attributes that take IN.
        entities: Kinds with keys of any name.
        dataset: Attributes of datasets.
    """

    numbers: Mapping[str, str]
    texts: Mapping[str, str]
    lists: Collection[str] = ()
    entities: Collection[Entity] = (Entity.TAG,)
    dataset: Collection[str] = ()


RUNS = Grammar(
    numbers={"start_time": "start_time", "created": "start_time", "Created": "start_time", "end_time": "end_time"},
    texts={
        "run_id": "run_id",
        "run_uuid": "run_id",
        "run_name": "run_name",
        "run name": "run_name",
        "Run name": "run_name",
        "Run Name": "run_name",
        "user_id": "user_id",
        "user": "user_id",
        "status": "status",
        "artifact_uri": "artifact_uri",
    },
    lists=("run_id", "status"),
    entities=(Entity.METRIC, Entity.PARAM, Entity.TAG),
    dataset=("name", "digest", "context"),
)
EXPERIMENTS = Grammar(
    numbers={
        "creation_time": "creation_time",
        "last_update_time": "last_update_time",
    },
    texts={"name": "name", "experiment_id": "experiment_id"},
)
REGISTERED_MODELS = Grammar(numbers={}, texts={"name": "name"}, lists=("name",))
REGISTERED_MODEL_ORDERS = Grammar(
    numbers={"timestamp": "updated", "last_updated_timestamp": "updated"}, texts={"name": "name"}, entities=()
)
MODEL_VERSIONS = Grammar(
    numbers={"version_number": "version"},
    texts={"name": "name", "run_id": "run_id", "source_path": "source"},
    lists=("name", "run_id"),
)
MODEL_VERSION_ORDERS = Grammar(
    numbers={"version_number": "version", "creation_timestamp": "created", "last_updated_timestamp": "updated"},
    texts={"name": "name"},
    entities=(),
)
_CREATED = ("creation_timestamp_ms", "creation_timestamp", "creation_time")
_UPDATED = ("last_updated_timestamp_ms", "last_updated_timestamp", "last_updated_time")
_OF_LOGGED_MODELS = ("name", "model_id", "model_type", "source_run_id", "experiment_id", "status", "artifact_location")
LOGGED_MODELS = Grammar(
    numbers={**dict.fromkeys(_CREATED, "created"), **dict.fromkeys(_UPDATED, "updated")},
    texts={name: name for name in _OF_LOGGED_MODELS},
    lists=_OF_LOGGED_MODELS,
    entities=(Entity.METRIC, Entity.PARAM, Entity.TAG),
)

_SPELLINGS = {
    "metric": Entity.METRIC,
    "metrics": Entity.METRIC,
    "param": Entity.PARAM,
    "params": Entity.PARAM,
    "parameter": Entity.PARAM,
    "parameters": Entity.PARAM,
    "tag": Entity.TAG,
    "tags": Entity.TAG,
    "attribute": Entity.ATTRIBUTE,
    "attributes": Entity.ATTRIBUTE,
    "attr": Entity.ATTRIBUTE,
    "run": Entity.ATTRIBUTE,
    "dataset": Entity.DATASET,
    "datasets": Entity.DATASET,
}
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>[^\W\d]\w*(?:\.(?:[\w/:-]+|`[^`]*`|"[^"]*"))* | `[^`]*`)
      | (?P<text>'[^']*'|"[^"]*")
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w))
      | (?P<sign>!=|>=|<=|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_NUMERIC = ("=", "!=", ">", ">=", "<", "<=")
_TEXTUAL = ("=", "!=", "LIKE", "ILIKE")
_PRESENCE = ("IS NULL", "IS NOT NULL")
_LISTS = ("IN", "NOT IN")


def parse_filter(text: str | None, grammar: Grammar) -> tuple[Comparison, ...]:
    """Parse a filter.

    Args:
        text: `metrics.loss < 0.1 AND tags.team = 'red'`. None and blanks select everything.
        grammar: Names that the list has.

    Raises:
        Refusal: It is no filter of this list.
    """
    if not text or not text.strip():
        return ()
    if len(text) > FILTER_LENGTH:
        raise _wrong(text, f"has {len(text)} characters; use at most {FILTER_LENGTH}")
    return _Parser(text, _tokens(text), grammar).clauses()


def parse_order(keys: Sequence[str], grammar: Grammar) -> tuple[Order, ...]:
    """Parse the keys to order by, such as `["metrics.loss ASC", "start_time DESC"]`.

    Raises:
        Refusal: One is no key of this list, or one comes twice.
    """
    orders: list[Order] = []
    for text in keys:
        tokens = _tokens(text, "order_by") if len(text) <= 1000 else []
        is_word = len(tokens) == 2 and tokens[1][0] == "name" and tokens[1][1].upper() in {"ASC", "DESC"}
        if not tokens or tokens[0][0] != "name" or not (len(tokens) == 1 or is_word):
            raise _wrong(text, "Invalid order_by clause; write it as `metrics.loss DESC`", "order_by")
        entity, key = _resolve(text, tokens[0][1], grammar, "order_by")
        if any((order.entity, order.key) == (entity, key) for order in orders):
            raise _wrong(text, "`order_by` contains duplicate fields; name each once", "order_by")
        orders.append(Order(entity, key, is_word and tokens[1][1].upper() == "DESC"))
    return tuple(orders)


class _Parser:
    def __init__(self, text: str, tokens: list[tuple[str, str]], grammar: Grammar) -> None:
        self._text = text
        self._tokens = tokens
        self._grammar = grammar
        self._position = 0

    def clauses(self) -> tuple[Comparison, ...]:
        clauses = [self._comparison()]
        while self._position < len(self._tokens):
            kind, word = self._next()
            if kind != "name" or word.upper() != "AND":
                raise _wrong(self._text, f"Invalid clause(s) in filter string near {word[:40]!r}; join clauses by AND")
            clauses.append(self._comparison())
            if len(clauses) > CLAUSES:
                raise _wrong(self._text, f"has more than {CLAUSES} clauses; use fewer")
        return tuple(clauses)

    def _comparison(self) -> Comparison:
        kind, name = self._next()
        if kind != "name":
            raise _wrong(self._text, f"Invalid clause(s) in filter string near {name[:40]!r}; begin with entity.key")
        entity, key = _resolve(self._text, name, self._grammar, "filter")
        operator = self._operator()
        is_number = entity is Entity.METRIC or (entity is Entity.ATTRIBUTE and key in self._grammar.numbers.values())
        legal = _NUMERIC if is_number else self._text_operators(entity, key)
        if operator not in legal:
            raise _wrong(self._text, f"Invalid comparator {operator!r} for {name[:80]}; use one of {', '.join(legal)}")
        return Comparison(entity, key, operator, self._value(operator, is_number))

    def _text_operators(self, entity: Entity, key: str) -> tuple[str, ...]:
        if entity in {Entity.PARAM, Entity.TAG}:
            return _TEXTUAL + _PRESENCE
        if entity is Entity.DATASET or key in self._grammar.lists:
            return _TEXTUAL + _LISTS
        return _TEXTUAL

    def _operator(self) -> str:
        kind, word = self._next()
        if kind == "sign":
            return word
        upper = word.upper()
        if upper == "NOT":
            return f"NOT {self._next()[1].upper()}"
        if upper == "IS":
            following = self._next()[1].upper()
            return "IS NULL" if following == "NULL" else f"IS {following} {self._next()[1].upper()}"
        return upper

    def _value(self, operator: str, is_number: bool) -> float | int | str | tuple[str, ...] | None:
        if operator in _PRESENCE:
            return None
        if operator in _LISTS:
            return self._list()
        kind, word = self._next()
        if is_number:
            if kind != "number":
                raise _wrong(self._text, f"Expected numeric value, not {word[:40]!r}; write a number without quotes")
            return int(word) if re.fullmatch(r"[-+]?\d{1,18}", word) else float(word)
        if kind != "text":
            raise _wrong(self._text, f"Expected a quoted string value, not {word[:40]!r}; put it in quotes")
        value = word[1:-1]
        if operator in {"LIKE", "ILIKE"} and (
            len(value) > PATTERN_LENGTH or value.count("%") + value.count("_") > 200 or value.count("%") > WILDCARDS
        ):
            raise _wrong(
                self._text,
                f"a pattern may have {PATTERN_LENGTH} characters and {WILDCARDS} times `%`; shorten it",
            )
        return value

    def _list(self) -> tuple[str, ...]:
        values: list[str] = []
        if self._next() != ("sign", "("):
            raise _wrong(self._text, "IN needs a list such as ('a', 'b'); put it in parentheses")
        while True:
            kind, word = self._next()
            if kind != "text":
                raise _wrong(self._text, f"a list has quoted values only, not {word[:40]!r}; put it in quotes")
            values.append(word[1:-1])
            kind, word = self._next()
            if (kind, word) == ("sign", ")"):
                return tuple(values)
            if (kind, word) != ("sign", ","):
                raise _wrong(self._text, "a list is separated by commas; add one")

    def _next(self) -> tuple[str, str]:
        if self._position >= len(self._tokens):
            raise _wrong(self._text, "Invalid clause(s) in filter string: it ends too early; complete the last clause")
        self._position += 1
        return self._tokens[self._position - 1]


def _tokens(text: str, field: str = "filter") -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _wrong(
                text,
                f"Invalid clause(s) in {field} string near {text[position : position + 40]!r}; mend it there",
                field,
            )
        tokens.append((match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return tokens


def _resolve(text: str, name: str, grammar: Grammar, field: str) -> tuple[Entity, str]:
    """Find the entity and the canonical key of a name such as metrics.`train/loss`."""
    prefix, dot, key = name.partition(".") if not name.startswith("`") else ("", "", name)
    if not dot:
        entity, key = Entity.ATTRIBUTE, name
    elif prefix.lower() in _SPELLINGS:
        entity = _SPELLINGS[prefix.lower()]
    else:
        raise _wrong(text, f"Invalid entity type {prefix[:40]!r}; use metrics, params, tags or attributes", field)
    key = _unquote(key)
    if entity is Entity.ATTRIBUTE:
        canonical = grammar.numbers.get(key) or grammar.texts.get(key)
        if canonical is None:
            legal = ", ".join(dict.fromkeys((*grammar.numbers.values(), *grammar.texts.values())))
            raise _wrong(text, f"Invalid attribute key {key[:80]!r}; use one of {legal}", field)
        return entity, canonical
    is_known = key in grammar.dataset if entity is Entity.DATASET else entity in grammar.entities
    if not is_known or not key:
        raise _wrong(text, f"Invalid key {name[:80]!r}; search by another, because this list does not have it", field)
    return entity, key


def _unquote(key: str) -> str:
    if len(key) >= 2 and key[0] == key[-1] and key[0] in '`"':
        return key[1:-1]
    return key


def _wrong(text: str, problem: str, field: str = "filter") -> Refusal:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return Refusal(Reason.INVALID, f"{field}={shown!r}: {problem}", field=field)

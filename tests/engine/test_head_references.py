"""References of a client in its head: held by the client's numbers, and refused ones say why."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from skyward.engine.head.references import ClientReferences
from skyward.engine.kept_values import KeptBlob
from skyward.errors import InternalError, UsageError
from skyward.wire.blobs import pack_places
from skyward.wire.frames import FrameKind
from tests.engine.parts import Parts


def test_a_reference_that_the_head_refused_says_why_until_the_client_forgets_it(parts: Parts) -> None:
    references = ClientReferences(itertools.count(1, 2).__next__)
    error = UsageError("put(): no room")
    references.refuse([(b"d" * 16, 5, 2)], error)
    assert references.missing(b"d" * 16, "it") is error
    assert isinstance(references.missing(b"e" * 16, "it"), InternalError)
    references.release(2)
    assert isinstance(references.missing(b"d" * 16, "it"), InternalError)


def test_values_of_an_earlier_head_are_held_where_they_are_and_dropped_with_their_references(parts: Parts) -> None:
    kept, coming, lost = (letter * 16 for letter in (b"k", b"c", b"l"))
    agent = parts.add_link()
    parts.ledger.links[0].facts["blobs"] = pack_places([(kept, 5, 2), (coming, 6, 0), (b"u" * 16, 7, 1)])
    blobs = [KeptBlob(digest, 5, None, parts.values) for digest in (kept, coming, lost)]
    dropped: list[bytes] = []

    def drop() -> list[bytes]:
        for forget in forgotten:
            forget()
        with parts.ledger:
            parts.ledger.dirty.add(parts.ledger.links[0])
        dropped.extend(frame.body for frame in agent.received() if frame.kind == FrameKind.DROP_BLOB)
        return dropped

    forgotten: list[Callable[[], object]] = []
    parts.values.soon = forgotten.append
    with parts.ledger:
        parts.values.on_up(0)
        parts.values.find(blobs)
    assert [parts.values.nodes_of((blob,)) for blob in blobs] == [(0,), (0,), ()]
    with parts.ledger:
        parts.ledger.links[0].keep(coming, 6)  # the value that has brought it comes again, and goes
        parts.ledger.links[0].forget_blob(coming, is_held=True)
    assert drop() == []
    blobs.clear()
    assert sorted(drop()) == [coming, kept + (2).to_bytes(4, "little")]


def test_a_reference_is_held_by_the_number_that_the_client_gave_it(parts: Parts) -> None:
    references = ClientReferences(itertools.count(1, 2).__next__)
    blob = KeptBlob(b"d" * 16, 5, None, parts.values)
    references.hold_as([(blob.digest, blob.size, 2)], [blob])
    assert references.named(blob.digest) is blob
    references.release(2)
    digest = blob.digest
    del blob
    assert references.named(digest) is None

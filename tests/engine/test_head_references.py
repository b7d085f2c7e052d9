"""References of a client in its head: held by the client's numbers, and refused ones say why."""

from __future__ import annotations

import itertools

from skyward.engine.head.references import ClientReferences
from skyward.engine.kept_values import KeptBlob
from skyward.errors import InternalError, UsageError
from tests.engine.parts import Parts


def test_a_reference_that_the_head_refused_says_why_until_the_client_forgets_it(parts: Parts) -> None:
    references = ClientReferences(itertools.count(1, 2).__next__)
    error = UsageError("put(): no room")
    references.refuse([(b"d" * 16, 5, 2)], error)
    assert references.missing(b"d" * 16, "it") is error
    assert isinstance(references.missing(b"e" * 16, "it"), InternalError)
    references.release(2)
    assert isinstance(references.missing(b"d" * 16, "it"), InternalError)


def test_a_reference_is_held_by_the_number_that_the_client_gave_it(parts: Parts) -> None:
    references = ClientReferences(itertools.count(1, 2).__next__)
    blob = KeptBlob(b"d" * 16, 5, None, parts.values)
    references.hold_as([(blob.digest, blob.size, 2)], [blob])
    assert references.named(blob.digest) is blob
    references.release(2)
    digest = blob.digest
    del blob
    assert references.named(digest) is None

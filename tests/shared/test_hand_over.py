"""Shared state that another store goes on with: values, leases of the program, fencing numbers; nothing waits."""

from __future__ import annotations

import pickle
from typing import Any

from skyward.shared.messages import OK, StoreRequest
from skyward.shared.store import Store

PROGRAM, TASK = 0, 7


class Asking:
    """A store with a session of the program, and the number of its last request."""

    def __init__(self) -> None:
        self.store = Store()
        self.number = 0
        self.store.open(PROGRAM, PROGRAM)

    def ask(self, kind: str, verb: str, *arguments: Any, options: tuple[Any, ...] = (), session: int = PROGRAM) -> Any:
        """Return the value of the answer; None if it waits."""
        self.number += 1
        fields = StoreRequest(kind, "x", verb, arguments, options, None, can_wait=True).fields()
        self.store.request(session, self.number, fields)
        answers, self.store.answers = self.store.answers, []
        assert all(answer.status == OK for answer in answers)
        return answers[0].value if answers else None


def test_another_store_goes_on_where_the_first_one_ended() -> None:
    before, after = Asking(), Asking()
    before.store.open(TASK, TASK)
    before.ask("dict", "set", "key", b"value")
    before.ask("queue", "put", b"first", options=(0,))
    fence = before.ask("lock", "acquire", options=(1,))
    before.ask("semaphore", "acquire", options=(2,), session=TASK)
    assert before.ask("event", "wait", session=TASK) is None

    after.store.take_over(pickle.loads(pickle.dumps(before.store.hand_over())))
    assert after.store.used_bytes == before.store.used_bytes
    assert after.ask("dict", "get", "key") == b"value"
    assert after.ask("queue", "get", options=(0,)) == b"first"
    assert after.ask("lock", "holds", fence, options=(1,))
    assert after.ask("semaphore", "state", options=(2,)) == (0, 0), "its task is not there"
    after.ask("lock", "release", options=(1,))
    assert after.ask("lock", "acquire", options=(1,)) > fence + 1
    after.store.leave(PROGRAM, after.number + 1, is_well=True)
    after.store.answers.clear()
    after.ask("dict", "clear")
    assert after.store.is_empty, "nothing waits"

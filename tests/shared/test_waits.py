"""Waits in the store: each request has one answer, nothing is lost or taken twice, and nothing stays behind."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skyward.shared.messages import OK, REFUSED, WITHDRAWN, StoreAnswer, StoreRequest
from skyward.shared.store import Store

SESSIONS = st.integers(1, 6)
PERMITS, ROOM = 2, 2
NO_LIMIT = object()


def owner_of(session: int) -> int:
    """Return the owner of a session: 101, 102 or 103, which have two each."""
    return 101 + session % 3


class Waits(RuleBasedStateMachine):
    """Six sessions of three calls use a semaphore, a queue and an event, against a model of each."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.numbers = dict.fromkeys(range(1, 7), 0)
        self.waiting: dict[int, tuple[str, Any]] = {}
        """Session -> what it waits for, oldest first."""
        self.last: dict[int, tuple[str, Any]] = {}
        """Session -> its last granted request and the value of the answer."""
        self.held: dict[int, int] = {}
        """Fencing number -> owner."""
        self.fence = 0
        self.queue: deque[bytes] = deque()
        self.is_set = False
        self.count = 0
        for owner in (101, 102, 103):
            self.store.open(owner, owner)
        for session in self.numbers:
            self.store.open(session, owner_of(session))

    def ask(self, session: int, kind: str, verb: str, *arguments: Any, timeout_s: float | None = None) -> None:
        options = {"semaphore": (PERMITS,), "queue": (ROOM,)}.get(kind, ())
        self.numbers[session] += 1
        request = StoreRequest(kind, "x", verb, arguments, options, timeout_s, can_wait=True)
        self.last.pop(session, None)
        self.store.request(session, self.numbers[session], request.fields())

    def take(self) -> dict[int, StoreAnswer]:
        answers, self.store.answers = self.store.answers, []
        assert len({answer.session for answer in answers}) == len(answers)
        assert all(answer.number == self.numbers[answer.session] for answer in answers)
        return {answer.session: answer for answer in answers}

    def expect(self, expected: dict[int, tuple[int, Any]]) -> None:
        found = self.take()
        assert {session: (answer.status, answer.value) for session, answer in found.items()} == expected

    # The model: what each change lets go on ---------------------------------------------------------------------------

    def grant(self, session: int) -> int:
        fence = max(answer.value for answer in self.store.answers if answer.session == session)
        assert fence > self.fence  # fencing numbers grow
        self.fence = fence
        self.held[fence] = owner_of(session)
        self.last[session] = "acquire", fence
        return int(fence)

    def pump(self) -> dict[int, tuple[int, Any]]:
        """Let all continue who can, in the order in which they came."""
        expected: dict[int, tuple[int, Any]] = {}
        has_moved = True
        while has_moved:
            has_moved = False
            for session, (verb, value) in list(self.waiting.items()):
                if verb == "acquire" and len(self.held) < PERMITS:
                    expected[session] = OK, self.grant(session)
                elif verb == "get" and self.queue:
                    expected[session] = OK, self.queue.popleft()
                    self.last[session] = verb, expected[session][1]
                elif verb == "put" and len(self.queue) < ROOM:
                    self.queue.append(value)
                    self.last[session] = verb, value
                    expected[session] = OK, None
                elif verb == "wait" and self.is_set:
                    expected[session] = OK, None
                else:
                    continue
                del self.waiting[session]
                has_moved = True
                break
        return expected

    # Steps ------------------------------------------------------------------------------------------------------------

    @rule(session=SESSIONS, waits=st.booleans(), verb=st.sampled_from(["acquire", "get", "put", "wait"]))
    def begin(self, session: int, waits: bool, verb: str) -> None:
        if session in self.waiting:
            return
        kind = {"acquire": "semaphore", "wait": "event"}.get(verb, "queue")
        self.count += 1
        value = b"%d" % self.count
        self.ask(session, kind, verb, *([value] if verb == "put" else []), timeout_s=None if waits else 0)
        self.waiting[session] = verb, value
        expected = self.pump()
        if session in self.waiting and not waits:
            del self.waiting[session]
            expected[session] = WITHDRAWN, None
        self.expect(expected)

    @rule(session=SESSIONS)
    def release(self, session: int) -> None:
        if session in self.waiting:
            return
        self.ask(session, "semaphore", "release")
        mine = [fence for fence, owner in self.held.items() if owner == owner_of(session)]
        if not mine:
            (answer,) = self.take().values()
            assert (answer.status, answer.value[0]) == (REFUSED, "UsageError")
            return
        del self.held[max(mine)]
        self.expect({session: (OK, None), **self.pump()})

    @rule(session=SESSIONS, verb=st.sampled_from(["set", "clear"]))
    def flag(self, session: int, verb: str) -> None:
        if session not in self.waiting:
            self.ask(session, "event", verb)
            self.is_set = verb == "set"
            self.expect({session: (OK, None), **self.pump()})

    @rule(session=SESSIONS)
    def withdraw(self, session: int) -> None:
        """The caller's timeout is over: a request that waits has not happened, and one with an answer keeps it."""
        self.store.withdraw(session, self.numbers[session])
        was_waiting = self.waiting.pop(session, None) is not None
        self.expect({session: (WITHDRAWN, None)} if was_waiting else {})

    @rule(session=SESSIONS)
    def forget(self, session: int) -> None:
        """The caller is gone: whatever its last request did is undone."""
        self.store.forget(session, self.numbers[session])
        self.waiting.pop(session, None)
        verb, value = self.last.pop(session, ("", None))
        if verb == "acquire":
            self.held.pop(value, None)
        elif verb == "get":
            self.queue.appendleft(value)
        elif verb == "put" and value in self.queue:
            self.queue.remove(value)
        self.expect(self.pump())

    @rule(owner=st.sampled_from([101, 102, 103]), is_well=st.booleans())
    def leave(self, owner: int, is_well: bool) -> None:
        self.store.leave(owner, 1, is_well=is_well)
        self.held = {fence: holder for fence, holder in self.held.items() if holder != owner}
        self.numbers[owner] = 1
        self.expect({owner: (OK, None), **self.pump()})

    @rule(session=SESSIONS)
    def break_off(self, session: int) -> None:
        """A connection ends and another takes its place."""
        self.store.close(session)
        self.waiting.pop(session, None)
        self.last.pop(session, None)
        self.expect(self.pump())
        self.store.open(session, owner_of(session))
        self.numbers[session] = 0

    @rule(owner=st.sampled_from([101, 102, 103]))
    def die(self, owner: int) -> None:
        """A process is killed: the agent ends all its connections, in any order."""
        for number in [*(s for s in range(1, 7) if owner_of(s) == owner), owner]:
            self.store.close(number)
            if self.waiting.pop(number, None) is not None:
                assert number not in self.take()
            self.last.pop(number, None)
        self.held = {fence: holder for fence, holder in self.held.items() if holder != owner}
        expected = self.pump()
        self.store.answers = [answer for answer in self.store.answers if owner_of(answer.session) != owner]
        self.expect(expected)
        for number in [owner, *(s for s in range(1, 7) if owner_of(s) == owner)]:
            self.store.open(number, owner)
            self.numbers[number] = 0

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        assert self.pump() == {}

    def teardown(self) -> None:
        for number in [101, 102, 103, *range(1, 7)]:
            self.store.close(number)
        self.store.open(1, 1)
        self.store.request(1, 1, StoreRequest("queue", "x", "clear", (), (ROOM,)).fields())
        self.store.request(1, 2, StoreRequest("event", "x", "clear").fields())
        assert self.store.is_empty
        assert self.store.used_bytes == 0


TestWaits = Waits.TestCase
TestWaits.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)

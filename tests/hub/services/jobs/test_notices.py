"""News of jobs: to a real webhook on loopback and to real programs, once or more, and only where it is allowed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.hub.model.jobs import AttemptEnd
from skyward.hub.model.notices import NoticeRules, parse_targets
from skyward.hub.model.refusal import Refusal
from skyward.hub.services.hub import Hub
from skyward.hub.services.jobs.history import JobDelivery
from skyward.hub.services.jobs.notices import PAUSES_S
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.secret_files import read_secret, remove_secret, secret_names, write_secret
from tests.hub.services.hubs import ADA
from tests.hub.services.jobs.job_world import World, both
from tests.hub.services.jobs.receiver import Receiver

SECRET = "a secret of the lab"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def allowed(world: World, receiver: Receiver, tmp_path: Path) -> Path:
    """Let the hub of the world send news to the receiver, and to a program. Return the program."""
    program = tmp_path / "tell"
    program.write_text(f'#!/bin/sh\ncat > {tmp_path}/told\nprintf "%s\\n" "$@" "$HOME" > {tmp_path}/arguments\n')
    program.chmod(0o755)
    use(world, NoticeRules(hosts=[receiver.host], commands=[str(program)]), tmp_path)
    write_secret(tmp_path / "secrets", "default", "LAB", SECRET)
    return program


def use(world: World, rules: NoticeRules, folder: Path) -> None:
    """Let another hub go on with the data of the world, as after a restart."""
    world.do(world.hub.close())
    blobs = FolderBlobs(folder / "blobs")
    world.hub = Hub(
        Database(world.url, clock=world.clock), blobs, steady=world.steady, rules=rules, secrets=folder / "secrets"
    )


def deliver(world: World) -> int:
    world.do(world.hub.leader.leads())
    return world.do(world.hub.courier.deliver_due())


def news(world: World, job: str) -> list[JobDelivery]:
    return list(world.do(world.hub.histories.history(ADA, job)).deliveries)


@both
def test_webhook_gets_the_end_of_a_job_signed(world: World, receiver: Receiver, allowed: Path) -> None:
    job = world.submit(notify=[receiver.target()])
    world.begin(job)
    assert deliver(world) == 0
    world.end(job, AttemptEnd.FAILED, error="ValueError: no")
    assert deliver(world) == 1
    ((headers, body),) = receiver.requests
    message = json.loads(body)
    assert (message["type"], message["timestamp"][:4]) == ("skyward.hub.job.failed", "2027")
    assert message["data"] == {
        "job": job,
        "name": "train",
        "project": "default",
        "user": "ada",
        "status": "failed",
        "attempt": 1,
        "cost_usd": 0.0,
        "text": "ValueError: no",
    }
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(SECRET.encode(), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert int(headers["webhook-timestamp"]) == int(world.now_s)
    (told,) = news(world, job)
    assert (told.kind, told.target, told.tries, told.next_at, told.error) == ("failed", "127.0.0.1", 1, None, "")
    assert told.delivered_at == world.clock()


@both
def test_delivery_is_retried_with_its_id_after_a_restart_and_given_up_in_the_end(
    world: World, receiver: Receiver, allowed: Path, tmp_path: Path
) -> None:
    receiver.status = 503
    job = world.submit(notify=[receiver.target()])
    world.do(world.hub.jobs.cancel(ADA, job))
    assert deliver(world) == 1
    assert news(world, job)[0].error == "status 503"
    use(world, NoticeRules(hosts=[receiver.host]), tmp_path)  # the hub is started again
    assert deliver(world) == 0
    for pause_s in PAUSES_S:
        world.now_s += pause_s
        assert deliver(world) == 1
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1
    assert len({headers["webhook-signature"] for headers, _ in receiver.requests}) == len(PAUSES_S) + 1
    (told,) = news(world, job)
    assert (told.tries, told.next_at, told.delivered_at) == (len(PAUSES_S) + 1, None, None)
    world.now_s += 1e6
    assert deliver(world) == 0


def test_receiver_that_is_gone_for_good_is_asked_once(world: World, receiver: Receiver, allowed: Path) -> None:
    receiver.status = 410
    job = world.submit(notify=[receiver.target()])
    world.do(world.hub.jobs.cancel(ADA, job))
    assert deliver(world) == 1
    assert (news(world, job)[0].error, news(world, job)[0].next_at) == ("status 410", None)


def test_lost_and_waiting_jobs_are_told_once_to_those_who_want_to_hear(
    world: World, receiver: Receiver, allowed: Path
) -> None:
    job = world.submit(notify=[receiver.target(on=["lost", "waiting"])], notify_wait_s=600, accelerator="H100")
    world.pass_s(599)
    assert deliver(world) == 0
    world.pass_s(2)
    world.pass_s(2)
    assert deliver(world) == 1
    assert news(world, job)[0].kind == "waiting"
    text = json.loads(receiver.requests[0][1])["data"]["text"]
    assert text.startswith("has waited for 601 s: waits for 1 node with H100")
    other = world.submit(notify=[receiver.target(on=["lost"])])
    world.begin(other)
    world.end(other, AttemptEnd.LOST, error="NodeLost: node 0")
    world.pass_s(5)
    world.poll()
    world.beat(other, 2)
    world.end(other, AttemptEnd.COMPLETED, 2)
    assert deliver(world) == 1
    assert [one.kind for one in news(world, other)] == ["lost"]


def test_program_gets_the_message_on_standard_input_and_no_shell_reads_its_arguments(
    world: World, allowed: Path, tmp_path: Path
) -> None:
    job = world.submit(notify=[{"command": [str(allowed), "$(id)", "; rm -rf /"], "on": ["cancelled"]}])
    world.do(world.hub.jobs.cancel(ADA, job))
    assert deliver(world) == 1
    assert news(world, job)[0].error == ""
    assert json.loads((tmp_path / "told").read_text())["data"]["job"] == job
    assert (tmp_path / "arguments").read_text() == "$(id)\n; rm -rf /\n\n"  # and none of the hub's variables


def test_program_that_fails_is_tried_again_and_its_error_is_shown(world: World, allowed: Path) -> None:
    allowed.write_text("#!/bin/sh\necho no mail today >&2\nexit 3\n")
    job = world.submit(notify=[{"command": [str(allowed)]}])
    world.do(world.hub.jobs.cancel(ADA, job))
    assert deliver(world) == 1
    (told,) = news(world, job)
    assert told.error == f"{allowed}: ended with status 3: no mail today"
    assert told.next_at == world.clock() + 5000


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"url": "https://169.254.169.254/latest", "secret": "LAB"}, "notify.url: the hub's operator does not allow"),
        ({"url": "http://example.org/", "secret": "LAB"}, "notify.url: http is for this machine only; use https"),
        ({"url": "http://127.0.0.1:1/", "secret": "LAB"}, "does not allow the host 127.0.0.1:1"),
        ({"url": "https://a@b/", "secret": "LAB"}, "notify.url: no address of a webhook"),
        ({"url": "https://b/\r\nx: y", "secret": "LAB"}, "notify.url: no address of a webhook"),
        ({"url": "https://b:99999/", "secret": "LAB"}, "notify.url: no address of a webhook"),
        ({"url": "https://b/"}, "notify.secret: missing; name the secret that signs the messages"),
        ({"command": ["/bin/sh", "-c", "id"]}, "notify.command='/bin/sh': the hub's operator does not allow"),
        ({"comand": ["x"]}, "notify.comand: unknown field; did you mean command?"),
        ({"command": ["x"], "on": ["faild"]}, "notify.on='faild': no such news; did you mean failed?"),
        ({}, "notify: a target has either a url or a command; give one of them"),
    ],
)
def test_target_that_is_illegal_or_not_allowed_is_refused(
    world: World, allowed: Path, target: dict[str, object], problem: str
) -> None:
    with pytest.raises(Refusal) as refusal:
        world.submit(notify=[target])
    assert problem in str(refusal.value)


def test_target_that_is_no_longer_allowed_gets_nothing(
    world: World, receiver: Receiver, allowed: Path, tmp_path: Path
) -> None:
    job = world.submit(notify=[receiver.target()])
    world.do(world.hub.jobs.cancel(ADA, job))
    use(world, NoticeRules(), tmp_path)
    assert deliver(world) == 1
    assert receiver.requests == []
    assert "does not allow the host" in news(world, job)[0].error


def test_hosts_may_have_ports_and_names_below_them() -> None:
    rules = NoticeRules(hosts=["*.example.org", "hooks.lab:8443"])
    for host, is_allowed in [
        ("a.example.org", True),
        ("A.example.org", True),
        ("example.org", False),
        ("a.b.example.org", False),
        ("a.example.org:8443", False),
        ("hooks.lab:8443", True),
        ("hooks.lab", False),
    ]:
        (target,) = parse_targets([{"url": f"https://{host}/", "secret": "LAB"}])
        if is_allowed:
            rules.check(target)
        else:
            with pytest.raises(UsageError, match="does not allow the host"):
                rules.check(target)


def test_secrets_are_files_of_their_projects_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert secret_names(folder, "default") == []
    write_secret(folder, "default", "LAB", "one")
    write_secret(folder, "default", "LAB", "two\n")
    assert (read_secret(folder, "default", "LAB"), secret_names(folder, "default")) == ("two", ["LAB"])
    assert (folder / "default" / "LAB").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="run `skyward hub secret set LAB --project vision` there"):
        read_secret(folder, "vision", "LAB")
    for project, name in [("default", "../x"), ("..", "LAB"), ("a/b", "LAB")]:
        with pytest.raises(UsageError):
            write_secret(folder, project, name, "x")
    (folder / "default" / "LAB").chmod(0o640)
    with pytest.raises(UsageError, match="others may read its file"):
        read_secret(folder, "default", "LAB")
    remove_secret(folder, "default", "LAB")
    assert secret_names(folder, "default") == []

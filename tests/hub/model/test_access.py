"""Roles and their rights."""

from __future__ import annotations

import pytest

from skyward.hub.model.access import Actor, Right, Role
from skyward.hub.model.refusal import Reason, Refusal


def actor(role: Role) -> Actor:
    return Actor(user="ada", organization=1, project=1, role=role)


@pytest.mark.parametrize("right", [Right.READ, Right.NONE])
def test_a_viewer_may_read(right: Right) -> None:
    actor(Role.VIEWER).require(right)


@pytest.mark.parametrize(("role", "right"), [(Role.VIEWER, Right.WRITE), (Role.RESEARCHER, Right.DELETE)])
def test_a_missing_right_is_refused_with_the_role_and_the_way_out(role: Role, right: Right) -> None:
    with pytest.raises(Refusal, match=f"role={role.name.lower()}: may not {right.value} here; ask an admin") as refused:
        actor(role).require(right)
    assert refused.value.reason is Reason.FORBIDDEN
    assert refused.value.field == "role"


def test_an_owner_may_do_everything() -> None:
    for right in Right:
        actor(Role.OWNER).require(right)

"""Identities and their rights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from .refusal import Reason, Refusal


class Role(IntEnum):
    """Role in a project. A higher role has all rights of a lower one."""

    VIEWER = 1
    RESEARCHER = 2
    ADMIN = 3
    OWNER = 4
    """Of the organization: admin of each of its projects, and the one who makes projects and users."""


class Right(StrEnum):
    """A right that a route demands."""

    READ = "read"
    WRITE = "write"
    """Make and change runs, experiments, models; delete and restore one's own."""
    DELETE = "delete"
    MANAGE = "manage"
    """Members, tokens of others, retention and the audit of a project."""
    OWN = "own"
    """Projects and users of the organization."""
    NONE = "none"
    """Anybody, even without a token: health and sign-in."""


NEEDED_ROLE = {
    Right.READ: Role.VIEWER,
    Right.WRITE: Role.RESEARCHER,
    Right.DELETE: Role.ADMIN,
    Right.MANAGE: Role.ADMIN,
    Right.OWN: Role.OWNER,
}


@dataclass(frozen=True, slots=True)
class Actor:
    """Identity behind one request, in one project.

    Attributes:
        user: Name of the user or service account.
        organization: Primary key of the organization.
        project: Primary key of the project that the request names.
        role: Role in that project.
        run: Id of the only run that the actor may touch, for a run's token.
        token: Id of the token, for the audit.
    """

    user: str
    organization: int
    project: int
    role: Role
    run: str | None = None
    token: str | None = None

    def require(self, right: Right) -> None:
        """Raise a `Refusal` unless the actor has `right`."""
        if right is not Right.NONE and self.role < NEEDED_ROLE[right]:
            role = self.role.name.lower()
            raise Refusal(
                Reason.FORBIDDEN,
                f"role={role}: may not {right.value} here; ask an admin of the project",
                field="role",
            )

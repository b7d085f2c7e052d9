"""SQL of accounts, memberships and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model.access import Role
from .transaction import ReadSnapshot, Transaction

EXPIRED_MS = 24 * 3600 * 1000
"""Milliseconds that an expired token stays, because the clock may be wrong for a while."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token with its account, as one query finds it."""

    id: str
    sha256: str
    kind: str
    account: int
    user: str
    organization: int
    is_owner: bool
    project: int | None
    role: int | None
    run: str | None
    expires_at: int | None
    used_at: int | None
    run_ended_at: int | None


@dataclass(frozen=True, slots=True)
class AccountRow:
    """A user or a service account."""

    id: int
    organization: int
    name: str
    kind: str
    is_owner: bool
    created_at: int
    disabled_at: int | None


_ACCOUNT = "SELECT id, organization, name, kind, is_owner, created_at, disabled_at FROM account"


def find_token(snapshot: ReadSnapshot, token_id: str) -> TokenRow | None:
    """Return a token whose account is enabled."""
    row = snapshot.execute(
        "SELECT t.id, t.sha256, t.kind, t.account, a.name, a.organization, a.is_owner, t.project, t.role, t.run,"
        # The client may tell any end. The hub itself heard of the run for the last time when it ended.
        " t.expires_at, t.used_at, CASE WHEN r.ended_at IS NULL THEN NULL ELSE coalesce(r.heartbeat_at, r.ended_at) END"
        " FROM token t JOIN account a ON a.id = t.account"
        " LEFT JOIN run r ON r.id = t.run AND r.project = t.project"
        " WHERE t.id = ? AND a.disabled_at IS NULL",
        (token_id,),
    ).fetchone()
    return TokenRow(*row) if row else None


def find_account(snapshot: ReadSnapshot, organization: int, name: str) -> AccountRow | None:
    row = snapshot.execute(f"{_ACCOUNT} WHERE organization = ? AND name = ?", (organization, name)).fetchone()
    return AccountRow(*row) if row else None


def accounts(snapshot: ReadSnapshot, organization: int) -> list[AccountRow]:
    rows = snapshot.execute(f"{_ACCOUNT} WHERE organization = ? ORDER BY name", (organization,))
    return [AccountRow(*row) for row in rows.fetchall()]


def project_named(snapshot: ReadSnapshot, organization: int, name: str) -> int | None:
    row = snapshot.execute(
        "SELECT id FROM project WHERE organization = ? AND name = ? AND deleted_at IS NULL", (organization, name)
    ).fetchone()
    return row[0] if row else None


def name_of_project(snapshot: ReadSnapshot, project: int) -> str:
    return str(snapshot.execute("SELECT name FROM project WHERE id = ?", (project,)).fetchone()[0])


def name_of_organization(snapshot: ReadSnapshot, organization: int) -> str:
    return str(snapshot.execute("SELECT name FROM organization WHERE id = ?", (organization,)).fetchone()[0])


def is_open(snapshot: ReadSnapshot, organization: int, project: int) -> bool:
    """Tell whether a project is there and not deleted."""
    row = snapshot.execute(
        "SELECT 1 FROM project WHERE organization = ? AND id = ? AND deleted_at IS NULL", (organization, project)
    ).fetchone()
    return row is not None


def role_in(snapshot: ReadSnapshot, project: int, account: int) -> Role | None:
    row = snapshot.execute(
        "SELECT role FROM membership WHERE project = ? AND account = ?", (project, account)
    ).fetchone()
    return Role(row[0]) if row else None


def first_project(snapshot: ReadSnapshot, account: int) -> int | None:
    """Return the oldest project of which the account is a member."""
    row = snapshot.execute(
        "SELECT m.project FROM membership m JOIN project p ON p.id = m.project"
        " WHERE m.account = ? AND p.deleted_at IS NULL ORDER BY m.project LIMIT 1",
        (account,),
    ).fetchone()
    return row[0] if row else None


def deleted_projects(snapshot: ReadSnapshot, organization: int) -> dict[int, str]:
    """Return the numbers and names of the projects that `gc` has not deleted yet."""
    rows = snapshot.execute(
        "SELECT id, name FROM project WHERE organization = ? AND deleted_at IS NOT NULL", (organization,)
    ).fetchall()
    return {int(number): str(name) for number, name in rows}


def projects(snapshot: ReadSnapshot, organization: int, account: int | None) -> list[Any]:
    """List open projects as (id, name, created_at, description).

    Args:
        snapshot: View of the database.
        organization: Its id.
        account: Only those of which it is a member. None: all.
    """
    if account is None:
        return list(
            snapshot.execute(
                "SELECT id, name, created_at, description FROM project"
                " WHERE organization = ? AND deleted_at IS NULL ORDER BY name",
                (organization,),
            ).fetchall()
        )
    return list(
        snapshot.execute(
            "SELECT p.id, p.name, p.created_at, p.description FROM membership m JOIN project p ON p.id = m.project"
            " WHERE m.account = ? AND p.organization = ? AND p.deleted_at IS NULL ORDER BY p.name",
            (account, organization),
        ).fetchall()
    )


def add_project(tx: Transaction, organization: int, name: str, description: str | None) -> int | None:
    """Add a project and return its id. None: the name is taken."""
    row = tx.execute(
        "INSERT INTO project (organization, name, description, created_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING RETURNING id",
        (organization, name, description, tx.now),
    ).fetchone()
    return int(row[0]) if row else None


def delete_project(tx: Transaction, project: int) -> None:
    # The next project of that name has a quota of its own.
    tx.execute(
        "DELETE FROM job_quota WHERE holder = 'project' AND name = (SELECT name FROM project WHERE id = ?)", (project,)
    )
    tx.execute("UPDATE project SET deleted_at = ?, name = name || '#' || id WHERE id = ?", (tx.now, project))


def describe_project(tx: Transaction, project: int, description: str) -> None:
    tx.execute("UPDATE project SET description = ? WHERE id = ?", (description, project))


def is_used(snapshot: ReadSnapshot, project: int) -> bool:
    """Tell whether a project has experiments, models, pools, jobs or sweeps, those in the bin among them."""
    tables = ("experiment", "registered_model", "pool", "job", "sweep")
    return any(
        snapshot.execute(f"SELECT 1 FROM {table} WHERE project = ? LIMIT 1", (project,)).fetchone() is not None
        for table in tables
    )


def members(snapshot: ReadSnapshot, project: int) -> list[tuple[str, str, int, int]]:
    """List members as (name, kind, role, created_at)."""
    rows = snapshot.execute(
        "SELECT a.name, a.kind, m.role, m.created_at FROM membership m JOIN account a ON a.id = m.account"
        " WHERE m.project = ? ORDER BY a.name",
        (project,),
    )
    return list(rows.fetchall())


def set_member(tx: Transaction, project: int, account: int, role: Role) -> None:
    tx.execute(
        "INSERT INTO membership (project, account, role, created_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (project, account) DO UPDATE SET role = excluded.role",
        (project, account, int(role), tx.now),
    )


def remove_member(tx: Transaction, project: int, account: int) -> bool:
    """Remove a member and the tokens that the account has for this project alone."""
    gone = tx.execute("DELETE FROM membership WHERE project = ? AND account = ?", (project, account)).rowcount
    tx.execute("DELETE FROM token WHERE project = ? AND account = ?", (project, account))
    return bool(gone)


def add_account(tx: Transaction, organization: int, name: str, kind: str, is_owner: bool) -> int | None:
    """Add an account and return its id. None: the name is taken."""
    row = tx.execute(
        "INSERT INTO account (organization, name, kind, is_owner, created_at) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING RETURNING id",
        (organization, name, kind, is_owner, tx.now),
    ).fetchone()
    return int(row[0]) if row else None


def disable_account(tx: Transaction, account: int) -> None:
    """Disable an account for good and delete its tokens."""
    tx.execute("UPDATE account SET disabled_at = ? WHERE id = ?", (tx.now, account))
    tx.execute("DELETE FROM token WHERE account = ?", (account,))


def count_owners(snapshot: ReadSnapshot, organization: int) -> int:
    row = snapshot.execute(
        "SELECT COUNT(*) FROM account WHERE organization = ? AND is_owner AND disabled_at IS NULL", (organization,)
    ).fetchone()
    return int(row[0])


def add_token(
    tx: Transaction,
    token_id: str,
    sha256: str,
    *,
    kind: str,
    account: int,
    name: str,
    project: int | None,
    role: int | None,
    run: str | None,
    expires_at: int | None,
) -> None:
    tx.execute(
        "INSERT INTO token (id, sha256, kind, account, name, project, role, run, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (token_id, sha256, kind, account, name, project, role, run, tx.now, expires_at),
    )


def tokens(snapshot: ReadSnapshot, organization: int, account: int | None) -> list[Any]:
    """List tokens as (id, user, name, kind, project, role, run, created_at, expires_at, used_at), newest first.

    Args:
        snapshot: View of the database.
        organization: Its id.
        account: Only those of this account. None: all.
    """
    columns = "t.id, a.name, t.name, t.kind, p.name, t.role, t.run, t.created_at, t.expires_at, t.used_at"
    source = "FROM token t JOIN account a ON a.id = t.account LEFT JOIN project p ON p.id = t.project"
    where = "WHERE a.organization = ? AND t.kind IN ('token', 'run')"
    order = "ORDER BY t.created_at DESC, t.id"
    if account is None:
        return list(snapshot.execute(f"SELECT {columns} {source} {where} {order}", (organization,)).fetchall())
    return list(
        snapshot.execute(
            f"SELECT {columns} {source} {where} AND t.account = ? {order}", (organization, account)
        ).fetchall()
    )


def delete_token(tx: Transaction, token_id: str) -> bool:
    return bool(tx.execute("DELETE FROM token WHERE id = ?", (token_id,)).rowcount)


def delete_expired(tx: Transaction) -> int:
    """Delete tokens that expired a day ago, sessions and codes among them. Nobody could use them since."""
    before = tx.now - EXPIRED_MS
    return int(tx.execute("DELETE FROM token WHERE expires_at IS NOT NULL AND expires_at < ?", (before,)).rowcount)


def touch_token(tx: Transaction, token_id: str) -> None:
    tx.execute("UPDATE token SET used_at = ? WHERE id = ?", (tx.now, token_id))

"""Tables that are made, migrated, or refused in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from skyward.errors import UsageError
from skyward.hub.store import registry_tables, schema, tables
from skyward.hub.store.database import Database
from skyward.hub.store.engines import database_url as parse
from skyward.hub.store.engines import open_engine


def migrations() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).with_name("migrations")))
    return config


def test_the_program_knows_all_revisions_in_their_order() -> None:
    script = ScriptDirectory.from_config(migrations())

    assert script.get_current_head() == schema.HEAD == schema.REVISIONS[-1]
    assert tuple(revision.revision for revision in script.walk_revisions())[::-1] == schema.REVISIONS


def test_the_page_about_the_hub_names_every_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hub.md").read_text()
    named = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)
    assert sorted(named) == sorted(tables.metadata.tables)


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection")
@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index")
@pytest.mark.parametrize("way", ["made", "migrated"])
def test_made_and_migrated_tables_are_those_that_the_program_declares(database_url: str, way: str) -> None:
    if way == "made":
        Database(database_url).close()
    engine = open_engine(parse(database_url), connections=1, writes=True)
    with engine.connect() as connection:
        if way == "migrated":
            config = migrations()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        differences = [
            difference
            for difference in compare_metadata(MigrationContext.configure(connection), registry_tables.metadata)
            # Alembic reads no DESC from SQLite, and takes these indexes for others.
            if getattr(difference[1], "name", None)
            not in {"run_by_start", "run_of_project_by_start", "logged_model_by_creation"}
            or connection.dialect.name != "sqlite"
        ]
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    assert (differences, revision) == ([], schema.HEAD)


def execute(database_url: str, statement: str) -> None:
    engine = open_engine(parse(database_url), connections=1, writes=True)
    with engine.connect() as connection:
        connection.execute(text(statement))
        connection.commit()
    engine.dispose()


def test_a_newer_database_is_refused_in_words_and_stays_as_it_is(database_url: str) -> None:
    Database(database_url).close()
    execute(database_url, "UPDATE alembic_version SET version_num = '9999'")

    for _ in range(2):  # the first refusal must not leave it locked
        with pytest.raises(UsageError, match="revision '9999', which is newer than this program's"):
            Database(database_url)
    execute(database_url, f"UPDATE alembic_version SET version_num = '{schema.HEAD}'")
    Database(database_url).close()


def test_the_database_of_another_program_is_refused(database_url: str) -> None:
    execute(database_url, "CREATE TABLE experiment (id INTEGER)")

    with pytest.raises(UsageError, match="its tables are of another program"):
        Database(database_url)

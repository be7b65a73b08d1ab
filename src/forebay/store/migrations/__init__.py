"""Schema migrations. A released migration is never edited; a change is a new one."""

from pathlib import Path
from typing import Final

from sqlalchemy import Connection

REVISIONS: Final = ("0001", "0002", "0003", "0004")
"""All schema versions that this version of Forebay knows, oldest first."""
HEAD: Final = REVISIONS[-1]


def upgrade(connection: Connection, revision: str = HEAD) -> None:
    """Migrate the schema to a version, within the transaction of the connection."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)

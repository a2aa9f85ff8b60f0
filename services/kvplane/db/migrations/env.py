"""What alembic runs, always started by `kvplane.db.migrate`."""

from alembic import context

from kvplane.db.metadata import metadata

connection = context.config.attributes.get("connection")
if connection is not None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite changes a table by making it anew.
        render_as_batch=connection.dialect.name == "sqlite",
    )
else:  # as SQL text
    context.configure(
        dialect_name=context.config.attributes["dialect"],
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
    )
with context.begin_transaction():
    context.run_migrations()

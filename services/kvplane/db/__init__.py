"""Storage shared by the services: connections, group commit, column types, migrations."""

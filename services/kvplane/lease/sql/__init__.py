"""The lease store in SQL, in parts; `kvplane.lease.store_sql` puts them together."""

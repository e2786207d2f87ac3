"""Where stores keep their rows: the seam, SQLite for the processes of one host, Postgres for several hosts."""

"""What must outlive a process: accounts, keys and the ledger, in SQLite or PostgreSQL. No wire, no policy."""

"""Worker processes on this host: fork server, worker pool, links and requests, for any kind of work."""

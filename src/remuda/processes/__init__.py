"""Worker processes of this host: fork server, worker pool, links, requests. Nothing here knows envs or learning."""

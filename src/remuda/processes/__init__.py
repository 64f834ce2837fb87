"""Worker processes on this host: fork server, worker pool, links, requests. Independent of envs and learning."""

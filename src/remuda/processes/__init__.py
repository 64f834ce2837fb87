"""Processes of this host and how they talk: links, bells, a fork server, a crew. No word of learning in it."""

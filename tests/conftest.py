"""Property tests do not time themselves, since a busy machine is no failure, and keep no examples."""

from hypothesis import settings

settings.register_profile("any machine", deadline=None, database=None)
settings.load_profile("any machine")

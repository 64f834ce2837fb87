"""Property tests here do not time themselves, since a busy machine is no failure, and keep no examples."""

from hypothesis import settings

settings.register_profile("data", deadline=None, database=None)
settings.load_profile("data")

"""For all tests."""

from hypothesis import settings

# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

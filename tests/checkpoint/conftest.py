"""Property tests here write files, whose time varies with the disk: no deadline for a single example."""

from hypothesis import settings

settings.register_profile("files", deadline=None)
settings.load_profile("files")

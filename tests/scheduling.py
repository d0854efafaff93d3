"""How pytest-xdist shares the tests out. Imported where it is used: a machine with a GPU may lack it."""

from xdist.scheduler import LoadFileScheduling

from tests.groups import group_of


class GroupScheduling(LoadFileScheduling):
    """The tests of a group run in one worker. (The marks of `--dist loadgroup` have no effect in pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

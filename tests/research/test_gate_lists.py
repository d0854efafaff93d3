"""What gates are fitted with, and what they are measured with, have no text in common."""

from benchmarks.research.gate.wordings import read_lists
from selector.gate.background import everyday_requests, phrases


def test_the_lists_are_disjoint() -> None:
    fitted, measured = phrases(), read_lists()
    requests = {request.text.casefold() for request in everyday_requests()}
    for ours, theirs in (
        (fitted.wrappers, measured.wrappers),
        (fitted.systems, measured.systems),
        (fitted.sentences, (*measured.sentences, *measured.lorem)),
        ([text for turn in fitted.turns for text in turn], [text for turn in measured.turns for text in turn]),
        (requests, (*measured.everyday, *measured.everyday_picture, *measured.languages, *measured.nonsense)),
        (requests, [q for tasks in measured.near_misses.values() for texts in tasks.values() for q in texts]),
    ):
        assert ours
        assert theirs
        common = {text.casefold() for text in ours} & {text.casefold() for text in theirs}
        assert not common

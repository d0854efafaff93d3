"""The everyday requests that gates are fitted with."""

from selector.gate.background import everyday_requests


def test_everyday_requests_are_many_and_each_is_once() -> None:
    requests = everyday_requests()
    assert len({request.text.casefold() for request in requests}) == len(requests) > 1600
    assert {request.language for request in requests} == {"de", "en", "es", "fr", "it"}
    assert {request.picture for request in requests} == {True, False}
    assert len({request.kind for request in requests[:100]}) > 5  # every prefix mixes them
    assert not any("{" in request.text for request in requests if request.kind != "code")

"""Progress where there is no terminal: few lines, and always the last."""

import pytest

from selector.runtime import progress
from selector.runtime.progress import progress_bar, track


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, *(4.0 * number for number in range(1, 11))])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress_bar("Training", 10, shown=True) as advance:
        for done in range(1, 11):
            advance(done, f"loss {done}")
    assert capsys.readouterr().err.splitlines() == [
        "Training: 1 of 10 after 4 s loss 1",
        "Training: 5 of 10 after 20 s loss 5",
        "Training: 9 of 10 after 36 s loss 9",
        "Training: 10 of 10 after 40 s loss 10",
    ]


def test_nothing_is_shown_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("ab", "Reading", shown=False)) == ["a", "b"]
    assert capsys.readouterr().err == ""

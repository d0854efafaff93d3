"""The package's counts of common words are those of its everyday requests: after a change there, write them anew."""

import json
from collections import Counter

from inducekv_vllm.facts.language import COMMON_WORDS, languages
from inducekv_vllm.facts.text import normalised
from selector.gate.background import everyday_requests


def test_they_are_what_the_command_writes() -> None:
    stored = json.loads(COMMON_WORDS.read_text(encoding="utf-8"))
    for code, language in languages().items():
        requests = [request.text for request in everyday_requests() if request.language == code]
        if not requests:
            assert code not in stored
            continue
        stems = [{language.stem(word.text) for word in language.words(normalised(text))} for text in requests]
        counts = Counter(stem for each in stems for stem in each)
        several = {stem: count for stem, count in counts.items() if count > 1 and stem.isalpha()}
        assert stored[code] == {"requests": len(requests), "stems": several}
        assert list(stored[code]["stems"]) == sorted(several)
    assert stored.keys() <= languages().keys()

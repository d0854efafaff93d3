"""How common words are: the everyday requests that have each stem, by language, for `inducekv_vllm.facts`.

python -m benchmarks.research.facts.common_words      # writes inducekv_vllm/facts/languages/common_words.json
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from inducekv_vllm.facts.language import COMMON_WORDS, Language, languages
from inducekv_vllm.facts.text import normalised
from selector.gate.background import everyday_requests


def common_words() -> dict[str, dict[str, Any]]:
    """By language: the number of its requests, and how many of them have each stem that several have."""
    counted: dict[str, dict[str, Any]] = {}
    for code, language in languages().items():
        requests = [request.text for request in everyday_requests() if request.language == code]
        counts = Counter(stem for text in requests for stem in stems_of(text, language) if stem.isalpha())
        if requests:
            several = {stem: count for stem, count in sorted(counts.items()) if count > 1}
            counted[code] = {"requests": len(requests), "stems": several}
    return counted


def stems_of(text: str, language: Language) -> set[str]:
    return {language.stem(word.text) for word in language.words(normalised(text))}


def written(counted: dict[str, dict[str, Any]]) -> str:
    return json.dumps(counted, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    COMMON_WORDS.write_text(written(common_words()), encoding="utf-8")

"""A cache with the npm packages of `benchmarks.research.real_pictures`, made up: blots in place of drawings."""

import json
from collections import Counter
from pathlib import Path

from benchmarks.real.items import fraction_of
from benchmarks.research.real_pictures.concepts import GROUPS, Concepts, concepts_of
from benchmarks.research.real_pictures.icons import FOLDER, PACKAGES, IconPackage, Icons
from tests.unit.benchmarks.made_up_packages import MadeUp

EACH = 100  # of a group
NO_CONCEPTS = ["sunset", "hot-dog"]  # one that is left out by name, and one of two words


def made_up_names() -> list[str]:
    return [emoji.names["en"] for emoji in MadeUp().emoji][: EACH * len(GROUPS)]


def blot(package: IconPackage, name: str) -> str:
    """The place follows from the name, the colour from the vendor."""
    x, y = (round(8 + 16 * fraction_of(f"{axis} {name}")) for axis in "xy")
    colour = round(0xFFFFFF * fraction_of(package.vendor))
    return f'<path fill="#{colour:06x}" d="M0 0h{x}v{y}h8v8h-{x + 8}z"/>'


def save_icons(cache: Path) -> Path:
    """Every package has every name, except that those which may lack some have every other one."""
    names = made_up_names()
    categories = {
        category: [*names[number * EACH : (number + 1) * EACH], *NO_CONCEPTS]
        for number, category in enumerate(GROUPS.values())
    }
    names += NO_CONCEPTS
    for package in PACKAGES:
        folder = cache / FOLDER / "node_modules" / "@iconify-json" / package.name
        folder.mkdir(parents=True)
        icons = {name: {"body": blot(package, name)} for name in names[:: 2 if package.partial else 1]}
        (folder / "package.json").write_text(json.dumps({"version": package.version}))
        (folder / "icons.json").write_text(json.dumps({"icons": icons, "width": 32, "height": 32}))
        (folder / "metadata.json").write_text(json.dumps({"categories": categories}))
    return cache


def made_up_concepts(cache: Path) -> Concepts:
    concepts = concepts_of([Icons.read(package, cache) for package in PACKAGES])
    assert Counter(concept.group for concept in (*concepts.base, *concepts.new)) == dict.fromkeys(GROUPS, EACH)
    return concepts

"""What each format version holds, and which contents it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from inducekv_vllm.bundle import METADATA_KEY, Bundle, file, read_bundle, spans, write_bundle
from inducekv_vllm.bundle.tensors import PAYLOADS
from inducekv_vllm.errors import BundleError
from tests.inducekv_vllm.bundles import D, G, J, L, older, random_bundle, random_gated_bundle, random_maps

DECOUPLED: dict[str, Any] = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "text"}}


def decoupled_bundle(**changes: Any) -> Bundle:
    return random_bundle(**(DECOUPLED | changes))


def mapped_bundle(**changes: Any) -> Bundle:
    return decoupled_bundle(**random_maps((L, 5, J, 4, D), 3, G), **changes)


def metadata_of(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as opened:
        content: dict[str, Any] = json.loads(opened.metadata()[METADATA_KEY])
    return content


@pytest.mark.parametrize(
    ("bundle", "version", "later_fields"),
    [
        (random_bundle(), 1, set()),
        (decoupled_bundle(), 3, {"gate_tasks", "form", "activations"}),
        (mapped_bundle(), 4, {"gate_tasks", "form", "activations", "output_map"}),
    ],
)
def test_each_version_has_its_own_fields(bundle: Bundle, version: int, later_fields: set[str], tmp_path: Path) -> None:
    path = tmp_path / "bundle.safetensors"
    fields = {"gate_tasks", "form", "activations", "output_map", "payload_digests", "gate"}
    for each, number, expected in ((older(bundle), version, later_fields), (bundle, 6, fields - {"gate"})):
        write_bundle(each, path)
        stored = metadata_of(path)
        assert stored["format_version"] == number
        assert stored.keys() & fields == expected
        read = read_bundle(path)
        assert read.metadata == each.metadata
        assert all(torch.equal(t, bundle.tensors()[name]) for name, t in read.tensors().items())


@pytest.mark.parametrize(
    "changes",
    [{}, {"form": "decoupled", "activations": {"a": "prompt", "b": "generation"}}],
    ids=["merged", "decoupled"],
)
def test_a_gate_makes_it_version_7(changes: dict[str, Any], tmp_path: Path) -> None:
    for bundle in (random_gated_bundle(**changes), older(random_gated_bundle(**changes))):
        write_bundle(bundle, tmp_path / "bundle.safetensors")
        stored = metadata_of(tmp_path / "bundle.safetensors")
        assert stored["format_version"] == 7
        assert stored["gate"] == {"layers": [0, 2], "prototypes": 4, "turn_begin": [], "turn_end": None}
        assert read_bundle(tmp_path / "bundle.safetensors").metadata == bundle.metadata


def test_gates_of_decoupled_memory_are_any_finite_numbers() -> None:
    gates = torch.linspace(-3, 4, L)
    assert torch.equal(decoupled_bundle(value_gates=gates).value_gates, gates)
    with pytest.raises(BundleError, match="value_gates contains NaN or infinite"):
        decoupled_bundle(value_gates=torch.full((L,), float("inf")))
    with pytest.raises(BundleError, match="value_gates must be above 0 and at most 1"):
        random_bundle(value_gates=gates)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weighting": "sqrt"}, "decoupled memory needs the weighting prior or uniform, found 'sqrt'"),
        ({"activations": {}}, r"decoupled memory needs activations for the tasks \[t\], found \[\]"),
        ({"activations": {"t": "text", "u": "text"}}, r"for the tasks \[t\], found \[t, u\]"),
        ({"activations": {"t": "answer"}}, "activations.t: Input should be 'prompt', 'text' or 'generation'"),
        ({"form": "merged"}, "merged memory needs the weighting sqrt or prior, found 'uniform'"),
        ({"form": "merged", "weighting": "prior"}, r"merged memory needs activations for the tasks \[\], found \[t\]"),
        ({"form": "mixed"}, "form: Input should be 'merged' or 'decoupled'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        decoupled_bundle(**changes)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"map_out": None}, "maps need both map_in and map_out, or neither"),
        ({"map_out": draw(L, 5, J, G * D, 2)}, r"map_out must be torch.float16 \[3, 5, 2, 16, 3\], found .*16, 2\]"),
        ({"map_in": draw(L, 4, J, 3, G * D)}, r"map_in must be torch.float16 \[3, 5, 2, 3, 16\], found .*\[3, 4, 2"),
        ({"map_in": draw(L, 5, J, 3)}, "map_in must have 5 dimensions, found 4"),
        ({"map_in": draw(L, 5, J, 3, 12)}, "a map acts on whole heads of 8, found the width 12"),
        ({"map_in": draw(L, 5, J, 17, 16)}, "a map of width 16 has at most that rank, found the rank 17"),
        ({"map_in": torch.full((L, 5, J, 3, 16), float("nan"))}, "map_in contains NaN"),
        (
            {"form": "merged", "weighting": "prior", "activations": {}},
            "need the decoupled form, found 'merged'",
        ),
    ],
)
def test_maps_that_are_refused(changes: dict[str, Any], problem: str) -> None:
    maps: dict[str, Any] = random_maps((L, 5, J, 4, D), 3, G)
    with pytest.raises(BundleError, match=problem):
        random_bundle(**(DECOUPLED | maps | changes))


def test_the_activation_of_a_request() -> None:
    tasks: dict[str, Any] = {"a": "generation", "b": "text"}
    metadata = random_gated_bundle(form="decoupled", activations=tasks).metadata
    assert [metadata.activation_of(task) for task in ("a", "b", None)] == ["generation", "text", "text"]
    assert random_bundle().metadata.activation_of(None) == "prompt"


def test_the_digest_covers_form_and_activation() -> None:
    bundles = [
        random_bundle(weighting="prior"),
        decoupled_bundle(weighting="prior"),
        decoupled_bundle(),
        decoupled_bundle(activations={"t": "generation"}),
        mapped_bundle(),
    ]
    assert len({bundle.digest for bundle in bundles}) == len(bundles)


def test_a_version_that_does_not_fit_its_content(tmp_path: Path) -> None:
    bundle = older(decoupled_bundle())
    wrong = bundle.metadata.model_copy(update={"format_version": 2})
    with pytest.raises(BundleError, match="decoupled memory with 0 gate_tasks and no map is format version 3, found 2"):
        write_bundle(Bundle(**bundle.tensors(), metadata=wrong), tmp_path / "bundle.safetensors")
    assert not list(tmp_path.iterdir())


class TestPayloadDigests:
    """Format version 6: what is in a digest, and reading a bundle in part."""

    def test_equal_payloads_have_equal_digests(self) -> None:
        """Whatever the rest of the bundle is, and wherever in it they are."""
        bundle = random_bundle(weighting="prior")
        payload = {name: bundle.tensors()[name].clone() for name in ("payload_keys", "payload_values")}
        for tensor in payload.values():
            tensor[:, [0, 1]] = tensor[:, [1, 0]]
        payload["payload_values"][-1, 3, -1, -1, -1] += 1
        found = random_bundle(seed=7, value_gates=torch.full((L,), 0.25), **payload).metadata.payload_digests
        own = bundle.metadata.payload_digests
        assert (found[0], found[1], found[2], found[4]) == (own[1], own[0], own[2], own[4])
        assert found[3] != own[3]
        assert decoupled_bundle(**payload).metadata.payload_digests == found
        assert len({*found, *own}) == 6

    def test_maps_and_shapes_are_covered(self) -> None:
        payload = {"payload_keys": torch.zeros(L, 1, J, 4, D), "payload_values": torch.zeros(L, 1, J, 4, D)}
        wide = {name: torch.zeros(L, 1, J, 2, D) for name in payload}
        maps = random_maps((L, 1, J, 4, D), 2, G)
        entries = {"entries": random_bundle().metadata.entries[:1]}
        bundles = [
            random_bundle(1, 4, **payload, **entries),
            random_bundle(1, 2, **wide, **entries),
            random_bundle(1, 4, **payload, **DECOUPLED, **entries, **maps),
            random_bundle(1, 4, **payload, **DECOUPLED, **entries, **maps | {"map_in": -maps["map_in"]}),
        ]
        assert len({bundle.metadata.payload_digests for bundle in bundles}) == 4

    @pytest.mark.parametrize("known", [set(), {0}, {1, 2}, {0, 2, 4}, {0, 1, 2, 3, 4}])
    def test_known_payloads_are_not_read(self, known: set[int], tmp_path: Path) -> None:
        bundle, path = mapped_bundle(), tmp_path / "bundle.safetensors"
        write_bundle(bundle, path)
        digests = bundle.metadata.payload_digests
        asked: list[Any] = []
        part = read_bundle(path, known=lambda each: asked.append(each) or {digests[row] for row in known})
        assert asked == [digests]
        rows = [row for row in range(5) if row not in known]
        assert (part.rows is None) == (not known)
        assert part.rows is None or part.rows.tolist() == rows
        assert (part.digest, part.num_entries, part.payload_tokens) == (bundle.digest, 5, 4)
        for name, tensor in part.tensors().items():
            whole = bundle.tensors()[name]
            assert torch.equal(tensor, whole[:, rows] if name in PAYLOADS else whole)

    @pytest.mark.parametrize(
        ("limits", "calls"),
        [
            ({}, 2),  # one for each tensor of payloads, and nothing of it alone
            ({"GAP_BYTES": 0}, 0),
            ({"MOST_SPANS": 2}, None),
            ({"READ_BYTES": 3000}, None),
            ({"GAP_BYTES": 700, "READ_BYTES": 5000, "MOST_SPANS": 3}, None),
        ],
    )
    def test_scattered_payloads_are_read_with_what_lies_between(
        self, limits: dict[str, int], calls: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle, path = random_bundle(num_entries=40), tmp_path / "bundle.safetensors"
        write_bundle(bundle, path)
        for name, value in limits.items():
            monkeypatch.setattr(spans, name, value)
        read, scratch = spans._read_at_once, []

        def read_at_once(source: Any, near: Any, gap: memoryview) -> bool:
            scratch.append(gap)
            assert len(near) > 1
            return read(source, near, gap)

        monkeypatch.setattr(spans, "_read_at_once", read_at_once)
        digests, rows = bundle.metadata.payload_digests, [0, 1, 5, 6, 7, 12, 20, 38]
        part = read_bundle(path, known=lambda _: set(digests) - {digests[row] for row in rows})
        assert part.rows is not None
        assert part.rows.tolist() == rows
        assert torch.equal(part.payload_keys, bundle.payload_keys[:, rows])
        assert torch.equal(part.payload_values, bundle.payload_values[:, rows])
        if calls is not None:
            assert len(scratch) == calls

    @pytest.mark.parametrize("left", [0, 0.3, 0.7, 0.99])
    def test_a_file_that_becomes_shorter_meanwhile(
        self, left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle, path = random_bundle(num_entries=40), tmp_path / "bundle.safetensors"
        write_bundle(bundle, path)
        read = file._read_rows

        def cut(opened: Any, start: int, *arguments: Any) -> None:
            os.truncate(path, start + int(left * bundle.payload_keys.nbytes))
            read(opened, start, *arguments)

        monkeypatch.setattr(file, "_read_rows", cut)
        digests = bundle.metadata.payload_digests
        with pytest.raises(BundleError, match="the file became shorter while it was read"):
            read_bundle(path, known=lambda _: digests[1:-1:2])

    def test_a_version_without_digests_is_read_whole(self, tmp_path: Path) -> None:
        bundle = older(random_bundle())
        write_bundle(bundle, tmp_path / "bundle.safetensors")
        part = read_bundle(tmp_path / "bundle.safetensors", known=lambda digests: pytest.fail("it has none"))
        assert part.rows is None

    def test_damage_in_what_is_read_is_found(self, tmp_path: Path) -> None:
        """And damage in what is not read does no harm: the reader has the right content."""
        bundle, path = random_bundle(), tmp_path / "bundle.safetensors"
        write_bundle(bundle, path)
        content = bytearray(path.read_bytes())
        start = content.index(bundle.payload_values[1, 3].numpy().tobytes())
        content[start + 4] ^= 1
        path.write_bytes(content)
        digests = bundle.metadata.payload_digests
        for known in ((), digests[:3]):
            with pytest.raises(BundleError, match="does not match its digest: the payload of entry 'e3' is damaged"):
                read_bundle(path, known=lambda _, known=known: known)  # type: ignore[misc]
        assert read_bundle(path, known=lambda _: digests[2:4]).rows is not None

    def test_a_changed_digest_is_found(self, tmp_path: Path) -> None:
        bundle, path = random_bundle(), tmp_path / "bundle.safetensors"
        write_bundle(bundle, path)
        digest = bundle.metadata.payload_digests[2]
        path.write_bytes(path.read_bytes().replace(digest.encode(), digest[::-1].encode()))
        with pytest.raises(BundleError, match="the content does not match its digest: the file"):
            read_bundle(path, known=lambda digests: digests)

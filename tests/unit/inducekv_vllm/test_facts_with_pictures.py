"""What a bundle keeps of the pictures of a fact, and which of its questions a request about a picture asks."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from inducekv_vllm.backbone.stored_facts import StoredQuestions
from inducekv_vllm.bundle import PictureRecord
from inducekv_vllm.files.picture import MAX_THUMBNAIL, decoded, digest_of, joined
from inducekv_vllm.teaching import fact_of
from tests.drawings import drawings
from tests.encodings import encodings, in_mode, saved

RED, *OTHERS = drawings(4, 0)


def record(*pictures: Image.Image) -> PictureRecord:
    return PictureRecord.of(pictures)


def test_the_digest_is_that_of_the_pixels() -> None:
    """In whatever file: of two with the same bytes and another size, and of two orders, it is another."""
    files = encodings()
    same = [digest_of(decoded(files[name])) for name in ("PNG, RGB", "BMP, RGB", "TIFF, tiff_lzw", "PPM, RGB")]
    assert set(same) == {digest_of(in_mode("RGB"))}
    assert digest_of(decoded(files["JPEG, RGB"])) not in same
    flat = in_mode("RGB").tobytes()
    assert digest_of(Image.frombytes("RGB", (24, 40), flat)) not in same
    assert digest_of(decoded(saved(in_mode("RGBA"), "PNG"))) == digest_of(in_mode("RGBA"))
    first, second = "a" * 64, "b" * 64
    assert joined([first]) == first
    assert len({first, joined([first, second]), joined([second, first]), joined([first, first])}) == 4


def test_thumbnails_are_small() -> None:
    """Of the largest that a few pictures could need."""
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)) for _ in range(6)]
    thumbnail = record(*noise).thumbnail
    assert len(thumbnail) < MAX_THUMBNAIL
    shown = Image.open(io.BytesIO(base64.b64decode(thumbnail)))
    assert (shown.format, shown.size) == ("JPEG", (4 * 96, 96))
    assert record(RED).data_url.startswith("data:image/jpeg;base64,/9j/")


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "a" * 63},
        {"digest": "A" * 64},
        {"thumbnail": "no base64!"},
        {"thumbnail": base64.b64encode(b"<svg onload='x'>").decode()},
        {"thumbnail": base64.b64encode(b"\xff\xd8\xff" + bytes(MAX_THUMBNAIL)).decode()},
        {"else": ""},
    ],
)
def test_records_are_checked(change: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        PictureRecord(**(record(RED).model_dump() | change))


def test_questions_about_one_picture_are_told_apart_by_their_words() -> None:
    facts = [
        fact_of("What is this called?", "a bolt", id="red", picture=record(RED)),
        fact_of("What is this called?", "a nut", id="other", picture=record(OTHERS[0])),
        fact_of("How much does it weigh?", "2 kg", id="weight", picture=record(RED)),
        fact_of("What is the code of Lima?", "LIM", id="words"),
    ]
    questions = StoredQuestions(facts)

    def asked(text: str, picture: Image.Image | None, *, is_known: bool = True) -> list[str]:
        digest = digest_of(picture) if picture is not None and is_known else None
        found = questions.candidates(text, has_media=picture is not None, picture=digest)
        return [facts[each.number].id for each in found.by_words]

    assert asked("Please: what is this called?", RED) == ["red"]
    assert asked("What is this called?", OTHERS[0]) == ["other"]
    assert asked("How much does it weigh?", RED) == ["weight"]
    assert asked("How much does it weigh?", OTHERS[0]) == []
    assert asked("Who has painted the wall behind it?", RED) == []
    assert asked("What is this called?", OTHERS[1]) == []
    assert asked("What is this called?", RED, is_known=False) == []
    assert asked("What is this called?", None) == []
    assert asked("What is the code of Lima?", None) == ["words"]
    assert asked("What is the code of Lima?", RED) == []
    missed = questions.candidates("What is this called?", has_media=True, picture=digest_of(OTHERS[1])).missed
    assert missed is not None
    assert missed.why == "it shows other pictures"

"""A file of text, Markdown, HTML or PDF becomes text, and what cannot is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from inducekv_vllm.errors import TaskDataError
from selector.document.chunks import chunks_of
from selector.document.reading import MAX_BYTES, read_document

PAGE = "<html><body><h1>Valves</h1><p>The <b>kestrel</b> opens at 37 bar.</p><script>x()</script></body></html>"
# One page, "Opens at 37 bar", without a compressed stream.
PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length 45>>stream
BT /F 12 Tf 10 50 Td (Opens at 37 bar) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
startxref
0
%%EOF
"""


def test_text_comes_out_of_each_kind_of_file(tmp_path: Path) -> None:
    for name, data in (
        ("a.md", b"# Valves\r\n\r\nThe kestrel opens at 37 bar."),
        ("a.txt", b"\xef\xbb\xbfOpens at 37 bar"),
        ("a.html", PAGE.encode()),
        ("a.pdf", PDF),
    ):
        (tmp_path / name).write_bytes(data)
        text = read_document(tmp_path / name)
        assert "pens at 37 bar" in text
        assert not any(found in text for found in ("\r", "\ufeff", "<", "x()"))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "scanned.pdf")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing")
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "empty.html").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("Füße".encode("latin-1"))
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "large.txt").write_bytes(b"word " * (10 * 2**20 // 5))
    for name, problem in (
        ("scanned.pdf", "the document has no text: its pages are pictures; recognise their text first"),
        ("broken.pdf", "not a readable PDF"),
        ("empty.txt", "the document has no text"),
        ("empty.html", "the document has no text"),
        ("latin.txt", "expected text in UTF-8, found another byte at 1"),
        ("binary.txt", "expected text, found NUL bytes"),
        ("large.txt", f"the document has 10485760 bytes, expected {MAX_BYTES} at most: give it in parts"),
        ("missing.txt", "cannot read the document: No such file"),
    ):
        with pytest.raises(TaskDataError, match=problem) as raised:
            read_document(tmp_path / name)
        assert "\n" not in str(raised.value)


def test_pieces_make_up_the_document() -> None:
    """None is too long, and no word is lost, whether paragraphs, sentences or neither tell where to cut."""
    paragraphs = "\n\n".join(f"Number {n} is here. It is followed by another." for n in range(20))
    for text in (paragraphs, "One sentence. " * 100, "word " * 200):
        pieces = chunks_of(text, lambda part: len(part.split()), 30)
        assert " ".join(pieces).split() == text.split()
        assert max(len(piece.split()) for piece in pieces) <= 30
        assert len(pieces) < len(text.split()) / 10

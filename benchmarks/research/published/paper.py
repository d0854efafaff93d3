"""The paper's own tables of results, as printed, by suite: to stand beside a run of the same suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LLAVA, ONE_VISION = "LLaVA-v1.5-7B", "LLaVA-OV-4B"
MIXED = "rivals by soft accuracy, CL-MoE by exact match: not one metric"
Row = tuple[str, str, *tuple[float | None, ...]]  # a method, its backbone, its figures; None: not printed


@dataclass(frozen=True)
class PaperTable:
    """`columns` are those of the figures; `notes` says of a column or the table what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def _of(columns: slice, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Two of the figures of a table that has several suites; rows without any are left out."""
    cut = [(row[0], row[1], *row[2:][columns]) for row in rows]
    return tuple(row for row in cut if any(figure is not None for figure in row[2:]))


_CIT: tuple[Row, ...] = (
    ("Zero-shot", LLAVA, 31.68, None, 54.21, None),
    ("Multi-task", LLAVA, 74.78, None, 67.40, None),
    ("FineTune", LLAVA, 57.52, 48.12, 52.86, 47.31),
    ("LwF", LLAVA, 59.40, 49.52, 53.22, 48.40),
    ("EWC", LLAVA, 59.34, 50.20, 53.30, 48.95),
    ("L2P", LLAVA, 53.99, 48.51, 53.96, 52.83),
    ("O-LoRA", LLAVA, 64.54, 58.36, 62.60, 60.77),
    ("MoELoRA", LLAVA, 61.33, 52.06, 55.24, 50.58),
    ("HiDe-LLaVA", LLAVA, 68.94, 64.19, 64.70, 63.95),
    ("InduceKV", LLAVA, 69.82, 65.31, 66.05, 65.38),
    ("InduceKV", ONE_VISION, 70.25, 65.84, 66.38, 65.72),
)
_VQA: tuple[Row, ...] = (
    ("Vanilla", "LV/T5", 32.51, 20.69, 14.92, 30.80, 12.68, 25.94),
    ("EWC", "LV/T5", 37.28, 15.27, 15.77, 30.62, 13.01, 24.06),
    ("MAS", "LV/T5", 37.71, 14.91, 20.56, 11.16, 18.04, 10.07),
    ("ER", "LV/T5", 41.95, 10.20, 36.99, 5.99, 30.55, 4.91),
    ("DER", "LV/T5", 41.16, 11.28, 35.35, 8.62, 26.17, 5.12),
    ("VS", "LV/T5", 39.79, 12.70, 34.03, 8.79, 28.13, 4.45),
    ("VQACL", "LV/T5", 43.49, 9.10, 37.46, 6.96, 30.86, 4.12),
    ("CL-MoE", "LV", 51.34, -0.02, None, None, None, None),
    ("QUAD", "T5", None, None, 39.25, 4.91, 31.70, 2.91),
    ("InduceKV-LV", "LV", 52.64, 1.70, None, None, None, None),
    ("InduceKV-T5", "T5", None, None, 39.86, 4.54, 32.12, 2.68),
    ("InduceKV-OV", "OV", 53.12, 1.85, 40.73, 3.64, 33.25, 2.18),
)
_STAGE_1: tuple[Row, ...] = (
    ("FineTune", "stage 1", 49.32, 43.18),
    ("LwF", "stage 1", 50.44, 44.29),
    ("EWC", "stage 1", 50.61, 44.55),
    ("O-LoRA", "stage 1", 58.73, 56.21),
    ("MoELoRA", "stage 1", 55.46, 51.07),
    ("HiDe-LLaVA", "stage 1", 60.18, 58.84),
    ("InduceKV", "stage 1", 61.42, 60.13),
)
_DOMAIN: tuple[Row, ...] = (
    ("Replay", "LLaVA-1.5", 42.54, 15.90, 36.79, 31.74),
    ("EWC", "LLaVA-1.5", 44.79, 18.19, 35.55, 32.84),
    ("LwF", "LLaVA-1.5", 46.67, 20.55, 35.87, 34.36),
    ("CODA", "LLaVA-1.5", 48.55, 23.23, 34.19, 35.32),
    ("M-LoRA", "LLaVA-1.5", 53.41, 29.86, 30.97, 38.08),
    ("O-LoRA", "LLaVA-1.5", 56.77, 34.12, 36.52, 42.47),
    ("MoELoRA", "LLaVA-1.5", 46.83, 19.73, 38.06, 34.87),
    ("SMoELoRA", "LLaVA-1.5", 46.71, 18.87, 35.10, 33.56),
    ("L-SMoE", "LLaVA-1.5", 51.63, 28.59, 38.19, 39.47),
    ("SMoE", "LLaVA-1.5", 67.70, 41.28, 39.10, 49.36),
    ("InduceKV (matched)", "LLaVA-1.5", 68.92, 42.65, 40.44, 50.67),
    ("InduceKV (default)", ONE_VISION, 69.45, 43.16, 40.82, 51.14),
)
_AVG = 'Avg is the mean over stages, Last that of the last row, by the figures; the text calls Last "most recent task"'
TABLES: Mapping[str, tuple[PaperTable, ...]] = {
    "ucit": (PaperTable("UCIT, Table tab:main_cit", ("Avg", "Last"), _of(slice(0, 2), _CIT), (_AVG,)),),
    "coin": (
        PaperTable("CoIN, Table tab:main_cit", ("Avg", "Last"), _of(slice(2, 4), _CIT), (_AVG,)),
        PaperTable("CoIN from the stage-1 backbone, Table tab:coin_stage1", ("Avg", "Last"), _STAGE_1, (_AVG,)),
    ),
    "vqa10": (
        PaperTable(
            "VQAv2 in ten tasks, Table tab:main_vqa",
            ("AP", "AF"),
            _of(slice(0, 2), _VQA),
            (
                MIXED,
                "CL-MoE's AF is negative, which the paper's formula cannot be; the paper marks InduceKV's as best",
            ),
        ),
    ),
    "vqacl": (
        PaperTable(
            "VQACL: VQAv2, Table tab:main_vqa",
            ("AP", "Forget"),
            _of(slice(2, 4), _VQA),
            ("T5 rows train a re-initialised T5 on features of regions: another protocol",),
        ),
    ),
    "nextqa": (PaperTable("VQACL: NExT-QA, Table tab:main_vqa", ("AP", "Forget"), _of(slice(4, 6), _VQA)),),
    "domain": (
        PaperTable(
            "Medicine, Chart, Math, Table tab:app_domain",
            ("Med. Avg", "Chart Avg", "Math Acc", "Overall"),
            _DOMAIN,
            ("the averages mix recall, accuracy, RMS-F1 and BLEU", "mathematics is not part of the suite here"),
        ),
    ),
}

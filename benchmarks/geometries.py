"""The sizes of models that are measured without their weights; those of their language models' configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    layers: int  # L
    heads: int  # H
    kv_heads: int  # J
    head_size: int  # D
    hidden_size: int  # d
    intermediate_size: int  # of the MLP
    vocabulary: int  # tokens
    latent_size: int | None = None  # V of latent attention; None: D

    @property
    def value_size(self) -> int:
        """V"""
        return self.head_size if self.latent_size is None else self.latent_size

    @property
    def heads_per_kv_head(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


GEOMETRIES = {
    "qwen3-vl-2b": Geometry(28, 16, 8, 128, 2048, 6144, 151936),
    "qwen3-vl-4b": Geometry(36, 32, 8, 128, 2560, 9728, 151936),
    "qwen3-vl-8b": Geometry(36, 32, 8, 128, 4096, 12288, 151936),
    "qwen2.5-vl-7b": Geometry(28, 28, 4, 128, 3584, 18944, 152064),
    "llava-1.5-7b": Geometry(32, 32, 32, 128, 4096, 11008, 32064),
    "80m": Geometry(12, 12, 4, 64, 768, 2048, 1024),  # of no published model: what two cores can serve
    "tiny": Geometry(2, 6, 2, 64, 48, 64, 1024),
}
# Of latent attention (MLA), whose one KV head the kernels read as one for each 16 query heads.
LATENT_GEOMETRIES = {
    "deepseek-v2-lite": Geometry(27, 16, 1, 576, 2048, 10944, 102400, latent_size=512),
    "deepseek-v3": Geometry(61, 128, 8, 576, 7168, 18432, 129280, latent_size=512),
    "glm-4.7-flash": Geometry(47, 20, 2, 576, 2048, 10240, 154880, latent_size=512),
}

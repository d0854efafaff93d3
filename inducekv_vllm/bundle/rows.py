"""What a bundle takes of a pool, which lies in rows of G tokens: its entries, then their maps."""

from .metadata import BundleMetadata


def rows_of(metadata: BundleMetadata, heads_per_kv_head: int) -> int:
    """How many rows of G tokens a bundle takes."""
    return token_rows(metadata, heads_per_kv_head) + len(metadata.entries) * map_rank(metadata)


def token_rows(metadata: BundleMetadata, heads_per_kv_head: int) -> int:
    """`rows_of`, without the maps."""
    return -(-len(metadata.entries) * metadata.payload_tokens // heads_per_kv_head)


def map_rank(metadata: BundleMetadata) -> int:
    return 0 if metadata.output_map is None else metadata.output_map.rank

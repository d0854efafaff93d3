"""The tiles of a step, on the host: which rows share a tile, and which part of a memory a program reads.

A tile is one program's rows, all of one slot. The G heads of a KV head are folded into lanes:
lane = row * `lanes_per_row` + head. A work item is a range of the tokens of a tile's memory. Shapes: see the package.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

SMALL_MEMORY = 512  # tokens; up to here one program reads all of a memory
LEAST_ITEM = 128  # tokens; shorter work items cost more to merge than they save
LEAST_LANES, MOST_LANES = 16, 128
LEAST_TOKENS, MOST_TOKENS = 16, 64  # of a memory that a program reads at a time
MOST_READS = 2  # of so many tokens each, that overlap
LOW_TILE = 32  # lanes; tiles are not lowered further to have more of them
LANES_OF_FOUR_WARPS = 64  # a tensor core instruction of four warps has as many rows
MAP_OF_FOUR_WARPS = 512  # numbers of a map's row; wider ones spill 1 KiB of a thread's registers with four warps
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class Processors:
    """What the kernels need to know about a GPU."""

    count: int  # streaming multiprocessors
    shared_memory: int = 99 * 1024  # bytes that one program may use; what every NVIDIA GPU since Ampere has


@dataclass(frozen=True)
class LaunchShape:
    """Everything about a launch that does not change between the replays of a CUDA graph."""

    rows: int  # rows with memory, at most
    height: int  # rows of a tile
    tiles: int
    items: int  # work items; 0: memories are not split
    parts: int  # work items, at most, of the memories that are split
    programs: int  # for each KV head; they share out the tiles or items
    block_rows: int  # lanes of a tile, a power of 2
    block_tokens: int  # memory tokens that a program reads at a time, a power of 2
    maps: bool  # slots may have maps
    lse: bool  # slots may be merged
    warps: int
    stages: int  # of the software pipeline
    least_item: int = LEAST_ITEM  # tokens

    @property
    def split(self) -> bool:
        return self.items > 0

    @property
    def plan_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of `StepPlan.arrays`."""
        return (self.tiles, self.height), (self.tiles,), (self.items, 4), (self.tiles + 1 if self.split else 0,), (1,)

    @property
    def kind(self) -> tuple[int, ...]:
        """What the kernels are compiled for: launches of one kind differ in the numbers of rows, tiles and items."""
        return (
            *(self.height, self.block_rows, self.block_tokens, self.warps, self.stages),
            *(self.maps, self.lse, self.split),
        )


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows with memory of one step, padded to a `LaunchShape` with idle tiles and items."""

    tile_rows: IntArray  # [tiles, height]; live rows first, -1 behind them; tiles of long memories first
    tile_slot: IntArray  # [tiles]
    work: IntArray  # [items, 4]: tile (-1: idle), first token, end token, 1 if it is the tile's only item
    tile_work: IntArray  # [tiles + 1]; the items of tile t are tile_work[t] to tile_work[t + 1] - 1
    count: IntArray  # [1], of live tiles, or of live items if memories are split

    def arrays(self) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        return self.tile_rows, self.tile_slot, self.work, self.tile_work, self.count


def lanes_per_row(heads_per_kv_head: int, maps: bool) -> int:
    """G, or the next power of 2 if there are maps: a map takes the G heads of a row as one vector."""
    return _power_of_2(heads_per_kv_head) if maps else heads_per_kv_head


def launch_shape(
    *,
    rows: int,
    slots: int,
    largest_slot: int,
    longest: int,
    heads_per_kv_head: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    element_size: int,
    maps: bool,
    lse: bool,
    processors: Processors,
) -> LaunchShape:
    """Choose a launch that fits every step of up to `rows` rows in up to `slots` slots.

    Args:
        rows: R, or the number of rows that a graph is captured for.
        slots: different slots of these rows.
        largest_slot: rows of the slot that has most.
        longest: tokens of the longest memory that is expected. A longer one is right in every shape, and takes longer;
            so are shorter ones where memories are split.
        element_size: bytes of a query's element.
    """
    per_row = lanes_per_row(heads_per_kv_head, maps)
    wide = element_size > 2 or head_size > 128
    least = max(LOW_TILE, _power_of_2(per_row))  # to which tiles are lowered if there are too few for all processors
    most = max(MOST_LANES // 2 if wide else MOST_LANES, least)
    if is_latent := value_size < head_size:
        most = least  # with more lanes, what they have read spills
    block_rows = min(max(_power_of_2(largest_slot * per_row), LEAST_LANES), most)
    while block_rows > least and -(-rows // (block_rows // per_row)) * kv_heads < processors.count:
        block_rows //= 2
    height = block_rows // per_row
    tiles = most_tiles(rows, slots, height)
    fewest = -(-rows // height)
    split = longest > SMALL_MEMORY and fewest * kv_heads < PROGRAMS_PER_PROCESSOR * processors.count
    padded = _power_of_2(value_size)
    rest = _power_of_2(head_size - value_size) if is_latent else 0
    block_tokens, stages = _pipeline(block_rows, padded, rest, element_size, processors.shared_memory)
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors.count // kv_heads)
    crowded = block_rows > LANES_OF_FOUR_WARPS or (maps and per_row * padded > MAP_OF_FOUR_WARPS)
    return LaunchShape(
        rows=rows,
        height=height,
        tiles=tiles,
        items=tiles + wanted if split else 0,
        # Fewer than `wanted` tiles have more tokens than an item, and only they have more than one item.
        parts=min(tiles + wanted, 2 * wanted) if split else 0,
        programs=wanted if split else tiles,
        block_rows=block_rows,
        block_tokens=block_tokens,
        maps=maps,
        lse=lse,
        warps=8 if crowded or is_latent else 4,
        stages=stages,
        least_item=2 * LEAST_ITEM if is_latent else LEAST_ITEM,  # one program merges parts of wide values
    )


def most_tiles(rows: int, slots: int, height: int) -> int:
    """The most tiles of `height` that `rows` rows in up to `slots` slots can need."""
    slots = min(rows, slots)
    return slots + (rows - slots) // height


def idle_plan(shape: LaunchShape) -> StepPlan:
    """A step without memory: for capturing a graph, and for warming a kernel."""
    plan = StepPlan(*(np.full(size, -1, dtype=np.int32) for size in shape.plan_sizes))
    plan.tile_work.fill(0)
    plan.count.fill(0)
    return plan


def plan_tiles(slots: npt.ArrayLike, lengths: npt.ArrayLike, shape: LaunchShape) -> StepPlan:
    """Put the rows of each slot into tiles, and share the tokens that the tiles read out over work items.

    Args:
        slots: [R] of the rows; 0: no memory.
        lengths: [R] tokens of each row's memory, equal within a slot.

    Raises:
        ValueError: the rows need more tiles than the shape has.
    """
    slot, length = np.asarray(slots), np.asarray(lengths)
    plan = idle_plan(shape)
    rows = np.flatnonzero(slot)  # [n]
    rows = rows[np.lexsort((slot[rows], -length[rows]))]
    first = np.flatnonzero(np.diff(slot[rows], prepend=0))  # [slots]
    members = np.diff(first, append=len(rows))  # [slots]
    tiles_of_slot = -(-members // shape.height)
    first_tile = np.cumsum(tiles_of_slot) - tiles_of_slot
    number = np.arange(len(rows)) - np.repeat(first, members)  # of each row in its slot
    tiles = int(tiles_of_slot.sum())
    if tiles > shape.tiles:
        raise ValueError(
            f"{len(rows)} rows in {len(members)} slots need {tiles} tiles of {shape.height} rows, found {shape.tiles}"
        )
    plan.tile_rows[np.repeat(first_tile, members) + number // shape.height, number % shape.height] = rows
    plan.tile_slot[:tiles] = np.repeat(slot[rows[first]], tiles_of_slot)
    plan.count.fill(tiles)
    if shape.split and tiles:
        _share_out(length[plan.tile_rows[:tiles, 0]], shape, plan)
    return plan


def _share_out(tokens: npt.NDArray[np.integer], shape: LaunchShape, plan: StepPlan) -> None:
    """Fill the plan's work items with the tokens of its first tiles, [tiles]."""
    tiles = len(tokens)
    wanted = shape.items - shape.tiles
    most = max(shape.least_item, -(-int(tokens.sum()) // wanted))  # tokens of an item
    while -(-tokens[tokens > most] // most).sum() > wanted:  # a few programs would have one more than the others
        most += -(-most // 8)
    items = np.maximum(-(-tokens // most), 1).astype(np.int64)  # [tiles]; an empty memory has one, too
    each = np.maximum(-(-tokens // (items * shape.block_tokens)) * shape.block_tokens, shape.least_item)  # [tiles]
    items = np.maximum(-(-tokens // each), 1)
    first = np.cumsum(items) - items
    tile = np.repeat(np.arange(tiles), items)  # [items]
    begin = (np.arange(len(tile)) - first[tile]) * each[tile]
    end = np.minimum(begin + each[tile], tokens[tile])
    plan.work[: len(tile)] = np.stack([tile, begin, end, items[tile] == 1], axis=1)
    plan.tile_work[1 : tiles + 1] = np.cumsum(items)
    # Longer memories come first, so the items of split ones are the first, too: their partial results need no others.
    plan.tile_work[tiles + 1 :] = len(tile)
    plan.count.fill(len(tile))


def _pipeline(block_rows: int, value_size: int, rest: int, element_size: int, shared_memory: int) -> tuple[int, int]:
    """How many tokens to read at a time, and how many such reads overlap, so that they fit into the shared memory."""
    numbers = 2 * value_size + rest  # of a query and its result, and of a key and its value
    room = shared_memory - block_rows * numbers * element_size
    block_tokens = MOST_TOKENS // 2 if element_size > 2 or value_size > 128 else MOST_TOKENS
    token = numbers * element_size  # bytes of a key and its value
    while block_tokens * token > room and block_tokens > LEAST_TOKENS:
        block_tokens //= 2
    return block_tokens, 1 + min(MOST_READS, max(1, room // (block_tokens * token)))


def _power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (max(number, 1) - 1).bit_length()

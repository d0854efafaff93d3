"""The kernels. `launch.py` calls them, `twin.py` has the same in plain torch, and the package has the formulas.

Lane i of a tile is head i % LANES of its KV head, in row i // LANES. Logits are kept in units of log2, for exp2.
Constants: G, D and J as in the package; DP is D rounded up to a power of 2; BM lanes of a tile; BN tokens at a time.

Pools, tables and steps may have more than 2^31 numbers, so rows, tokens and slots are int64 where they are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Log-sum-exps often lie as [H, R]: no step of another number of rows may need another compilation.
CHANGING = ["lse_row", "lse_head"]


@triton.jit(do_not_specialize=CHANGING)
def memory_tiles(
    query,  # [R, H, D]
    output,  # [R, H, D], of self-attention; changed in place unless SPLIT
    self_lse,  # [R, H] float32; None without LSE
    keys,  # [J, P, D]
    values,  # [J, P, D]
    map_in,  # [J, Q, G D]; None without MAPS
    map_out,  # [J, Q, G D]; None without MAPS
    gate,  # [N + 1] float32, as every table of one column
    bias,
    token_index,  # [N + 1, K]
    log_weight,  # [N + 1, K]
    key_scale,  # [N + 1, K]
    value_scale,  # [N + 1, K]
    entry_tokens,
    length,
    log_remainder,
    decoupled,
    map_index,  # [N + 1, M]
    map_weight,  # [N + 1, M]
    map_rank,
    map_length,
    row_slot,  # [R]
    tile_rows,  # [tiles, height]
    work,  # [items, 4]
    partial_output,  # [parts, J, BM, D] float32; None unless SPLIT
    partial_sums,  # [parts, J, 2, BM] float32: the largest logit, and the sum of exp2(logit - largest)
    scale,
    query_row,  # strides, here and below
    query_head,
    output_row,
    output_head,
    lse_row,
    lse_head,
    keys_head,
    keys_token,
    values_head,
    values_token,
    map_in_head,
    map_in_row,
    map_out_head,
    map_out_row,
    terms_slot,
    map_slot,
    height,
    G: tl.constexpr,
    LANES: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    MAPS: tl.constexpr,
    LSE: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Read a tile's memory, or the tokens of one work item of it. Grid: (tiles, or items if SPLIT; J)."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = item
    if SPLIT:
        tile = tl.load(work + item * 4)
    first_row = tl.load(tile_rows + tile * height, mask=tile >= 0, other=-1)
    if first_row < 0:
        return
    first_slot = tl.load(row_slot + first_row)  # rows of a tile read the same entries
    begin = 0
    end = tl.load(length + first_slot)
    whole = 1
    if SPLIT:
        begin = tl.load(work + item * 4 + 1)
        end = tl.load(work + item * 4 + 2)
        whole = tl.load(work + item * 4 + 3)

    lane = tl.arange(0, BM)
    place = lane // LANES  # of the lane's row in the tile
    head = lane % LANES
    row = tl.load(tile_rows + tile * height + place, mask=place < height, other=-1)
    live = (row >= 0) & (head < G)
    slot = tl.load(row_slot + row, mask=live, other=0)
    column = tl.arange(0, DP)

    lanes = query + row.to(tl.int64) * query_row + (kv_head * G + head) * query_head
    q = tl.load(lanes[:, None] + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    kv_head_wide = kv_head.to(tl.int64)
    largest, total, read = _attend(
        q,
        keys + kv_head_wide * keys_head,
        values + kv_head_wide * values_head,
        token_index,
        log_weight,
        key_scale,
        value_scale,
        entry_tokens,
        slot,
        live,
        first_slot,
        begin,
        end,
        scale * LOG2E,
        keys_token,
        values_token,
        terms_slot,
        D=D,
        DP=DP,
        BM=BM,
        BN=BN,
        ONE_SLOT=ONE_SLOT,
        UPCAST=UPCAST,
        PRECISION=PRECISION,
    )

    if whole != 0:
        _finish(
            largest,
            total,
            read,
            row,
            kv_head * G + head,
            slot,
            live,
            tile_rows + tile * height,
            height,
            first_slot,
            output,
            self_lse,
            map_in,
            map_out,
            gate,
            bias,
            log_remainder,
            decoupled,
            map_index,
            map_weight,
            map_rank,
            map_length,
            row_slot,
            kv_head_wide,
            output_row,
            output_head,
            lse_row,
            lse_head,
            map_in_head,
            map_in_row,
            map_out_head,
            map_out_row,
            map_slot,
            G=G,
            LANES=LANES,
            ROWS=BM // LANES,
            D=D,
            DP=DP,
            BK=BK,
            MAPS=MAPS,
            LSE=LSE,
            UPCAST=UPCAST,
            PRECISION=PRECISION,
        )
    elif SPLIT:
        part = (item * J + kv_head).to(tl.int64) * BM
        tl.store(partial_sums + part * 2 + lane, largest)
        tl.store(partial_sums + part * 2 + BM + lane, total)
        part_places = (part + lane)[:, None] * D + column[None, :]
        tl.store(partial_output + part_places, read, mask=(column < D)[None, :])


@triton.jit(do_not_specialize=CHANGING)
def merge_items(
    output,
    self_lse,
    map_in,
    map_out,
    gate,
    bias,
    log_remainder,
    decoupled,
    map_index,
    map_weight,
    map_rank,
    map_length,
    row_slot,
    tile_rows,
    tile_work,  # [tiles + 1]
    split_rows,  # [rows]
    partial_output,
    partial_sums,
    output_row,
    output_head,
    lse_row,
    lse_head,
    map_in_head,
    map_in_row,
    map_out_head,
    map_out_row,
    map_slot,
    height,
    G: tl.constexpr,
    GP: tl.constexpr,
    LANES: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BI: tl.constexpr,
    BK: tl.constexpr,
    MAPS: tl.constexpr,
    LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Merge the work items of one row of a tile, BI items at a time; GP is G rounded up. Grid: (rows, J)."""
    number = tl.load(split_rows + tl.program_id(0))
    kv_head = tl.program_id(1)
    if number < 0:  # the others are finished, each by its only program
        return
    tile = number // height
    place = number % height
    row = tl.load(tile_rows + number)
    first = tl.load(tile_work + tile)
    end = tl.load(tile_work + tile + 1)

    head = tl.arange(0, GP)
    column = tl.arange(0, DP)
    lane = place * LANES + head
    live = head < G
    largest = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    read = tl.zeros([GP, DP], tl.float32)
    for chunk in range(first, end, BI):
        item = chunk + tl.arange(0, BI)
        here = (item < end)[:, None] & live[None, :]
        part = (item * J + kv_head).to(tl.int64) * BM
        sums = part[:, None] * 2 + lane[None, :]
        item_largest = tl.load(partial_sums + sums, mask=here, other=float("-inf"))  # [BI, GP]
        item_total = tl.load(partial_sums + sums + BM, mask=here, other=0.0)
        places = (part[:, None] + lane[None, :])[:, :, None] * D + column[None, None, :]
        inside = here[:, :, None] & (column < D)[None, None, :]
        item_read = tl.load(partial_output + places, mask=inside, other=0.0)  # [BI, GP, DP]
        new_largest = tl.maximum(largest, tl.max(item_largest, 0))
        top = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        keep = tl.exp2(largest - top)
        weight = tl.exp2(item_largest - top[None, :])
        total = total * keep + tl.sum(item_total * weight, 0)
        read = read * keep[:, None] + tl.sum(item_read * weight[:, :, None], 0)
        largest = new_largest

    slot = tl.load(row_slot + row)
    _finish(
        largest,
        total,
        read,
        row + tl.zeros([GP], tl.int32),
        kv_head * G + head,
        slot + tl.zeros([GP], tl.int32),
        live,
        tile_rows + tile * height + place,
        1,
        slot,
        output,
        self_lse,
        map_in,
        map_out,
        gate,
        bias,
        log_remainder,
        decoupled,
        map_index,
        map_weight,
        map_rank,
        map_length,
        row_slot,
        kv_head.to(tl.int64),
        output_row,
        output_head,
        lse_row,
        lse_head,
        map_in_head,
        map_in_row,
        map_out_head,
        map_out_row,
        map_slot,
        G=G,
        LANES=GP,
        ROWS=1,
        D=D,
        DP=DP,
        BK=BK,
        MAPS=MAPS,
        LSE=LSE,
        UPCAST=UPCAST,
        PRECISION=PRECISION,
    )


@triton.jit
def _attend(
    q,  # [BM, DP]
    keys,  # [P, D] of one KV head
    values,
    token_index,
    log_weight,
    key_scale,
    value_scale,
    entry_tokens,
    slot,  # [BM]
    live,  # [BM]
    first_slot,
    begin,
    end,
    scale,
    keys_token,
    values_token,
    terms_slot,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ONE_SLOT: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Read the tokens from `begin` to `end`.

    Returns the largest logit [BM], the sum of exp2(logit - largest) [BM], and the values weighted so [BM, DP].
    """
    column = tl.arange(0, DP)
    shared_terms = first_slot.to(tl.int64) * terms_slot
    terms = slot.to(tl.int64) * terms_slot
    tokens_each = tl.load(entry_tokens + first_slot)
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, DP], tl.float32)
    for start in range(begin, end, BN):
        token = start + tl.arange(0, BN)
        there = token < end
        entry = token // tokens_each
        first = tl.load(token_index + shared_terms + entry, mask=there, other=0)
        place = (first + token % tokens_each).to(tl.int64)
        inside = there[:, None] & (column < D)[None, :]
        k = tl.load((keys + place * keys_token)[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load((values + place * values_token)[:, None] + column[None, :], mask=inside, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        if ONE_SLOT:
            term = shared_terms + entry
            multiply = (tl.load(key_scale + term, mask=there, other=0.0) * scale)[None, :]
            add = (tl.load(log_weight + term, mask=there, other=float("-inf")) * LOG2E)[None, :]
            share = tl.load(value_scale + term, mask=there, other=0.0)[None, :]
        else:
            term = terms[:, None] + entry[None, :]
            known = live[:, None] & there[None, :]
            multiply = tl.load(key_scale + term, mask=known, other=0.0) * scale
            add = tl.load(log_weight + term, mask=known, other=float("-inf")) * LOG2E
            share = tl.load(value_scale + term, mask=known, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * multiply + add  # [BM, BN]
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        top = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = tl.exp2(logits - top[:, None])
        keep = tl.exp2(largest - top)
        total = total * keep + tl.sum(p, 1)
        p = (p * share).to(v.dtype)
        read = tl.dot(p, v, read * keep[:, None], input_precision=PRECISION)
        largest = new_largest
    return largest, total, read


@triton.jit
def _finish(
    largest,  # [lanes]
    total,  # [lanes]
    read,  # [lanes, DP]
    row,  # [lanes]
    head,  # [lanes], query head
    slot,  # [lanes]
    live,  # [lanes]
    rows,  # [ROWS]
    num_rows,
    first_slot,
    output,
    self_lse,
    map_in,
    map_out,
    gate,
    bias,
    log_remainder,
    decoupled,
    map_index,
    map_weight,
    map_rank,
    map_length,
    row_slot,
    kv_head,
    output_row,
    output_head,
    lse_row,
    lse_head,
    map_in_head,
    map_in_row,
    map_out_head,
    map_out_row,
    map_slot,
    G: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BK: tl.constexpr,
    MAPS: tl.constexpr,
    LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Merge what was read with self-attention's output, add the maps, and store what is finite."""
    column = tl.arange(0, DP)
    inside = live[:, None] & (column < D)[None, :]
    places = (output + row.to(tl.int64) * output_row + head * output_head)[:, None] + column[None, :]
    own = tl.load(places, mask=inside, other=0.0)

    lane_bias = tl.load(bias + slot, mask=live, other=0.0) * LOG2E
    lane_gate = tl.load(gate + slot, mask=live, other=0.0)
    remainder = tl.load(log_remainder + slot, mask=live, other=float("-inf")) * LOG2E + lane_bias
    largest = largest + lane_bias
    # The logit of what is not memory: self-attention's log-sum-exp, or that of decoupled memory's null token.
    other = tl.zeros_like(largest)
    if LSE:
        merged = tl.load(decoupled + slot, mask=live, other=1) == 0
        other = tl.load(self_lse + row.to(tl.int64) * lse_row + head * lse_head, mask=live & merged, other=0.0) * LOG2E
    top = tl.maximum(tl.maximum(largest, remainder), other)
    memory_weight = tl.exp2(largest - top)
    other_weight = tl.exp2(other - top)
    whole = total * memory_weight + other_weight + tl.exp2(remainder - top)
    result = read * (lane_gate * memory_weight / whole)[:, None]
    if MAPS:
        mapped = _mapped(
            own,
            rows,
            num_rows,
            first_slot,
            map_in + kv_head * map_in_head,
            map_out + kv_head * map_out_head,
            map_index,
            map_weight,
            map_rank,
            map_length,
            row_slot,
            map_in_row,
            map_out_row,
            map_slot,
            G=G,
            LANES=LANES,
            ROWS=ROWS,
            D=D,
            DP=DP,
            BK=BK,
            UPCAST=UPCAST,
            PRECISION=PRECISION,
        )
        result += lane_gate[:, None] * mapped
    if LSE:
        result += tl.where(merged, other_weight / whole, 1.0)[:, None] * own.to(tl.float32)
    else:
        result += own.to(tl.float32)
    stored = result.to(own.dtype)
    # Where it is not finite, memory counts as zero: the next layers would spread it.
    finite = tl.abs(stored.to(tl.float32)) < float("inf")
    tl.store(places, tl.where(finite, stored, own), mask=inside)


@triton.jit
def _mapped(
    own,  # [ROWS * LANES, DP]
    rows,
    num_rows,
    first_slot,
    map_in,  # [Q, G D] of one KV head
    map_out,
    map_index,
    map_weight,
    map_rank,
    map_length,
    row_slot,
    map_in_row,
    map_out_row,
    map_slot,
    G: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the maps make of self-attention's output, before the gate: [ROWS * LANES, DP]."""
    place = tl.arange(0, ROWS)
    row = tl.load(rows + place, mask=place < num_rows, other=-1)
    slot = tl.load(row_slot + row, mask=row >= 0, other=0)
    vector = tl.arange(0, LANES * DP)
    head = vector // DP
    column = vector % DP
    known = (head < G) & (column < D)
    blocks = tl.reshape(own, [ROWS, LANES * DP])
    if UPCAST:
        blocks = blocks.to(tl.float32)
    result = tl.zeros([ROWS, LANES * DP], tl.float32)
    rows_each = tl.load(map_rank + first_slot)
    end = tl.load(map_length + first_slot)
    # A memory has few map rows, and their tiles are wide: reads that overlap would not fit into the shared memory.
    for start in tl.range(0, end, BK, num_stages=1):
        k = start + tl.arange(0, BK)
        there = k < end
        entry = k // rows_each
        first = tl.load(map_index + first_slot.to(tl.int64) * map_slot + entry, mask=there, other=0)
        map_place = (first + k % rows_each).to(tl.int64)
        inside = there[:, None] & known[None, :]
        a = tl.load((map_in + map_place * map_in_row)[:, None] + (head * D + column)[None, :], mask=inside, other=0.0)
        b = tl.load((map_out + map_place * map_out_row)[:, None] + (head * D + column)[None, :], mask=inside, other=0.0)
        weighted = (row >= 0)[:, None] & there[None, :]
        weights = (map_weight + slot.to(tl.int64) * map_slot)[:, None] + entry[None, :]
        weight = tl.load(weights, mask=weighted, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
        inner = tl.dot(blocks, tl.trans(a), input_precision=PRECISION) * weight  # [ROWS, BK]
        # Float32, because an inner product of half a model's outputs need not fit into float16.
        result = tl.dot(inner, b.to(tl.float32), result, input_precision=PRECISION)
    return tl.reshape(result, [ROWS * LANES, DP])

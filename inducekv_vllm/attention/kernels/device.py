"""The kernel. `launch.py` calls it, `benchmarks/kernels/twin.py` is it in plain torch, the package has the formulas.

Lane i of a tile is head i % LANES of its KV head, in row i // LANES. Logits are kept in units of log2, for exp2.
Constants: G, V and J as in the package; Z = D - V numbers of a key stand behind the first V; VP and ZP are V and Z
rounded up to powers of 2; BM lanes of a tile; BN tokens, and BK map rows, at a time.

Pools, tables and steps may have more than 2^31 numbers, so rows, tokens and slots are int64 where they are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Log-sum-exps often lie as [H, R]: no step of another number of rows may need another compilation.
CHANGING = ["lse_row", "lse_head"]


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=["value_gate", "bias"])
def memory_tiles(
    query,  # [R, H, D]
    output,  # [R, H, V], of self-attention; changed in place
    self_lse,  # [R, H] float32; None without LSE
    keys,  # [J, P, D]
    values,  # [J, P, V]
    map_in,  # [J, Q, G V]; None without MAPS
    map_out,  # [J, Q, G V]; None without MAPS
    value_gate,  # [N + 1] float32, of this layer
    bias,  # [N + 1] float32
    first_token,  # [N + 1], as every table of one column
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
    tile_rows,  # [tiles, height]
    tile_slot,  # [tiles]
    work,  # [items, 4]
    tile_work,  # [tiles + 1]
    count,  # [1], of live tiles, or of live items if SPLIT
    arrivals,  # [tiles, J]
    partial_output,  # [parts, J, BM, V] float32; None unless SPLIT
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
    layer_slot,
    column_slot,
    terms_slot,
    map_slot,
    height,
    G: tl.constexpr,
    LANES: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    Z: tl.constexpr,
    ZP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INDIRECT_STAGES: tl.constexpr,
    MAPS: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Read a tile's memory, or the tokens of one work item of it; the tile's last program finishes its rows.

    Grid: (any number; J). Programs share out the tiles, or the items if SPLIT.
    """
    kv_head = tl.program_id(1)
    # What is the same for every item is worked out again: kept in registers it would spill them.
    for item in tl.range(tl.program_id(0), tl.load(count), tl.num_programs(0), num_stages=1, disable_licm=True):
        tile = item
        if SPLIT:
            tile = tl.load(work + item * 4)
        slot = tl.load(tile_slot + tile).to(tl.int64)
        column_of_slot = slot * column_slot
        # Before memory is read, which waits for what was read before: these wait for nothing.
        slot_value_gate = tl.load(value_gate + slot * layer_slot)
        slot_bias = tl.load(bias + slot * layer_slot) * LOG2E
        slot_remainder = tl.load(log_remainder + column_of_slot) * LOG2E
        begin = 0
        end = tl.load(length + column_of_slot)
        whole = 1
        if SPLIT:
            begin = tl.load(work + item * 4 + 1)
            end = tl.load(work + item * 4 + 2)
            whole = tl.load(work + item * 4 + 3)

        lane = tl.arange(0, BM)
        place = lane // LANES  # of the lane's row in the tile
        row = tl.load(tile_rows + tile * height + place, mask=place < height, other=-1)
        live = (row >= 0) & (lane % LANES < G)
        head = kv_head * G + lane % LANES
        column = tl.arange(0, VP)
        inside = live[:, None] & (column < V)[None, :]

        lanes = query + row.to(tl.int64) * query_row + head * query_head
        q = tl.load(lanes[:, None] + column[None, :], mask=inside, other=0.0)
        q_rest = q
        if Z > 0:
            behind = tl.arange(0, ZP)
            q_rest = tl.load(
                lanes[:, None] + (V + behind)[None, :], mask=live[:, None] & (behind < Z)[None, :], other=0.0
            )
        if UPCAST:
            q = q.to(tl.float32)
            q_rest = q_rest.to(tl.float32)

        kv_head_wide = kv_head.to(tl.int64)
        first = tl.load(first_token + column_of_slot)
        if first >= 0:
            largest, total, read = _attend_adjacent(
                q,
                q_rest,
                keys + kv_head_wide * keys_head + first.to(tl.int64) * keys_token,
                values + kv_head_wide * values_head + first.to(tl.int64) * values_token,
                begin,
                end,
                scale * LOG2E,
                keys_token,
                values_token,
                V=V,
                VP=VP,
                Z=Z,
                ZP=ZP,
                BM=BM,
                BN=BN,
                UPCAST=UPCAST,
                PRECISION=PRECISION,
            )
        else:
            largest, total, read = _attend(
                q,
                q_rest,
                keys + kv_head_wide * keys_head,
                values + kv_head_wide * values_head,
                token_index + slot * terms_slot,
                log_weight + slot * terms_slot,
                key_scale + slot * terms_slot,
                value_scale + slot * terms_slot,
                tl.load(entry_tokens + column_of_slot),
                begin,
                end,
                scale * LOG2E,
                keys_token,
                values_token,
                V=V,
                VP=VP,
                Z=Z,
                ZP=ZP,
                BM=BM,
                BN=BN,
                INDIRECT_STAGES=INDIRECT_STAGES,
                UPCAST=UPCAST,
                PRECISION=PRECISION,
            )

        if SPLIT:  # noqa: SIM102 - a constant of the compiler
            if whole == 0:
                part = (item * J + kv_head).to(tl.int64) * BM
                tl.store(partial_sums + part * 2 + lane, largest, mask=live)
                tl.store(partial_sums + part * 2 + BM + lane, total, mask=live)
                tl.store(partial_output + (part + lane)[:, None] * V + column[None, :], read, mask=inside)
                first_item = tl.load(tile_work + tile)
                items = tl.load(tile_work + tile + 1) - first_item
                tl.debug_barrier()  # all threads have stored before one of them says so
                arrived = tl.atomic_add(arrivals + tile * J + kv_head, 1, sem="acq_rel")
                if arrived == items - 1:
                    tl.store(arrivals + tile * J + kv_head, 0)  # for the next launch
                    largest, total, read = _merged(
                        partial_output,
                        partial_sums,
                        first_item,
                        first_item + items,
                        kv_head,
                        live,
                        J=J,
                        V=V,
                        VP=VP,
                        BM=BM,
                    )
                    whole = 1

        if whole != 0:
            places = (output + row.to(tl.int64) * output_row + head * output_head)[:, None] + column[None, :]
            own = tl.load(places, mask=inside, other=0.0)
            remainder = slot_remainder + slot_bias
            largest = largest + slot_bias
            # The logit of what is not memory: self-attention's log-sum-exp, or that of decoupled memory's null token.
            other = tl.zeros([BM], tl.float32)
            keeps_all = 1
            if LSE:
                keeps_all = tl.load(decoupled + column_of_slot)
                if keeps_all == 0:
                    lse = self_lse + row.to(tl.int64) * lse_row + head * lse_head
                    other = tl.load(lse, mask=live, other=0.0) * LOG2E
            top = tl.maximum(tl.maximum(largest, remainder), other)
            memory_weight = tl.exp2(largest - top)
            other_weight = tl.exp2(other - top)
            sum_of_all = total * memory_weight + other_weight + tl.exp2(remainder - top)
            result = read * (slot_value_gate * memory_weight / sum_of_all)[:, None]
            if LSE:
                result += tl.where(keeps_all == 0, other_weight / sum_of_all, 1.0)[:, None] * own.to(tl.float32)
            else:
                result += own.to(tl.float32)
            if MAPS:
                map_rows = tl.load(map_length + column_of_slot)
                if map_rows > 0:
                    result = _add_maps(
                        result,
                        own,
                        slot_value_gate,
                        map_in + kv_head_wide * map_in_head,
                        map_out + kv_head_wide * map_out_head,
                        map_index + slot * map_slot,
                        map_weight + slot * map_slot,
                        tl.load(map_rank + column_of_slot),
                        map_rows,
                        map_in_row,
                        map_out_row,
                        G=G,
                        LANES=LANES,
                        ROWS=BM // LANES,
                        V=V,
                        VP=VP,
                        BK=BK,
                        UPCAST=UPCAST,
                        PRECISION=PRECISION,
                    )
            stored = result.to(own.dtype)
            # Where it is not finite, memory counts as zero: the next layers would spread it.
            finite = tl.abs(stored.to(tl.float32)) < float("inf")
            tl.store(places, tl.where(finite, stored, own), mask=inside)


@triton.jit
def _attend_adjacent(
    q,  # [BM, VP], the first V numbers
    q_rest,  # [BM, ZP], the others; not read if Z is 0
    keys,  # [S, D] of one KV head and one slot
    values,
    begin,
    end,
    scale,
    keys_token,
    values_token,
    V: tl.constexpr,
    VP: tl.constexpr,
    Z: tl.constexpr,
    ZP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `_attend`, for tokens that are adjacent in the pool and have neutral terms: every address is known at once."""
    column = tl.arange(0, VP)
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, VP], tl.float32)
    for start in range(begin, end, BN):
        token = start + tl.arange(0, BN)
        there = token < end
        place = token.to(tl.int64)
        inside = there[:, None] & (column < V)[None, :]
        k = tl.load((keys + place * keys_token)[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load((values + place * values_token)[:, None] + column[None, :], mask=inside, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if Z > 0:
            products = _with_rest(products, q_rest, keys + V, place, there, keys_token, Z, ZP, UPCAST, PRECISION)
        logits = products * scale
        logits = tl.where(there[None, :], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        p = tl.exp2(logits - new_largest[:, None])
        keep = tl.exp2(largest - new_largest)
        total = total * keep + tl.sum(p, 1)
        read = tl.dot(p.to(v.dtype), v, read * keep[:, None], input_precision=PRECISION)
        largest = new_largest
    return largest, total, read


@triton.jit
def _attend(
    q,  # [BM, VP], the first V numbers
    q_rest,  # [BM, ZP], the others; not read if Z is 0
    keys,  # [P, D] of one KV head
    values,
    token_index,  # [K] of one slot, here and below
    log_weight,
    key_scale,
    value_scale,
    tokens_each,
    begin,
    end,
    scale,
    keys_token,
    values_token,
    V: tl.constexpr,
    VP: tl.constexpr,
    Z: tl.constexpr,
    ZP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    INDIRECT_STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Read the tokens from `begin` to `end`.

    Returns the largest logit [BM], the sum of exp2(logit - largest) [BM], and the values weighted so [BM, VP].
    """
    column = tl.arange(0, VP)
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, VP], tl.float32)
    for start in tl.range(begin, end, BN, num_stages=INDIRECT_STAGES):
        token = start + tl.arange(0, BN)
        there = token < end
        entry = token // tokens_each
        first = tl.load(token_index + entry, mask=there, other=0)
        place = (first + token).to(tl.int64)
        inside = there[:, None] & (column < V)[None, :]
        k = tl.load((keys + place * keys_token)[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load((values + place * values_token)[:, None] + column[None, :], mask=inside, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        multiply = tl.load(key_scale + entry, mask=there, other=0.0) * scale
        add = tl.load(log_weight + entry, mask=there, other=float("-inf")) * LOG2E
        share = tl.load(value_scale + entry, mask=there, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
        if Z > 0:
            products = _with_rest(products, q_rest, keys + V, place, there, keys_token, Z, ZP, UPCAST, PRECISION)
        logits = products * multiply[None, :] + add[None, :]
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        top = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # all weights so far may be 0
        p = tl.exp2(logits - top[:, None])
        keep = tl.exp2(largest - top)
        total = total * keep + tl.sum(p, 1)
        read = tl.dot((p * share[None, :]).to(v.dtype), v, read * keep[:, None], input_precision=PRECISION)
        largest = new_largest
    return largest, total, read


@triton.jit
def _with_rest(
    products,  # [BM, BN]
    q_rest,  # [BM, ZP]
    keys,  # at the first number of the rest
    place,  # [BN]
    there,
    keys_token,
    Z: tl.constexpr,
    ZP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`products` with those of the last Z numbers of queries and keys."""
    column = tl.arange(0, ZP)
    inside = there[:, None] & (column < Z)[None, :]
    k = tl.load((keys + place * keys_token)[:, None] + column[None, :], mask=inside, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    return tl.dot(q_rest, tl.trans(k), products, input_precision=PRECISION)


@triton.jit
def _merged(
    partial_output,
    partial_sums,
    first,
    end,
    kv_head,
    live,  # [BM]
    J: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BM: tl.constexpr,
):
    """What one program would have read, from the results of work items `first` to `end`.

    They come from other processors, so they are read around the cache of this one.
    """
    lane = tl.arange(0, BM)
    column = tl.arange(0, VP)
    inside = live[:, None] & (column < V)[None, :]
    largest = tl.full([BM], float("-inf"), tl.float32)
    for item in tl.range(first, end, loop_unroll_factor=4):
        part = (item * J + kv_head).to(tl.int64) * BM
        sums = partial_sums + part * 2 + lane
        largest = tl.maximum(largest, tl.load(sums, mask=live, other=float("-inf"), cache_modifier=".cg"))
    top = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, VP], tl.float32)
    for item in tl.range(first, end, loop_unroll_factor=4):
        part = (item * J + kv_head).to(tl.int64) * BM
        sums = partial_sums + part * 2 + lane
        weight = tl.exp2(tl.load(sums, mask=live, other=float("-inf"), cache_modifier=".cg") - top)
        total += tl.load(sums + BM, mask=live, other=0.0, cache_modifier=".cg") * weight
        places = partial_output + (part + lane)[:, None] * V + column[None, :]
        read += tl.load(places, mask=inside, other=0.0, cache_modifier=".cg") * weight[:, None]
    return largest, total, read


@triton.jit
def _add_maps(
    result,  # [ROWS * LANES, VP]
    own,  # [ROWS * LANES, VP], of self-attention
    slot_value_gate,
    map_in,  # [Q, G V] of one KV head
    map_out,
    map_index,  # [M] of one slot
    map_weight,
    rows_each,
    end,
    map_in_row,
    map_out_row,
    G: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`result` with what the maps make of self-attention's output."""
    vector = tl.arange(0, LANES * VP)
    head = vector // VP
    column = vector % VP
    known = (head < G) & (column < V)
    blocks = tl.reshape(own, [ROWS, LANES * VP])
    if UPCAST:
        blocks = blocks.to(tl.float32)
    result = tl.reshape(result, [ROWS, LANES * VP])
    # A memory has few map rows, and their tiles are wide: reads that overlap would not fit into the shared memory.
    for start in tl.range(0, end, BK, num_stages=1):
        k = start + tl.arange(0, BK)
        there = k < end
        entry = k // rows_each
        first = tl.load(map_index + entry, mask=there, other=0)
        map_place = (first + k % rows_each).to(tl.int64)
        inside = there[:, None] & known[None, :]
        a = tl.load((map_in + map_place * map_in_row)[:, None] + (head * V + column)[None, :], mask=inside, other=0.0)
        b = tl.load((map_out + map_place * map_out_row)[:, None] + (head * V + column)[None, :], mask=inside, other=0.0)
        weight = tl.load(map_weight + entry, mask=there, other=0.0) * slot_value_gate
        if UPCAST:
            a = a.to(tl.float32)
        inner = tl.dot(blocks, tl.trans(a), input_precision=PRECISION) * weight[None, :]  # [ROWS, BK]
        # Float32, because an inner product of half a model's outputs need not fit into float16.
        result = tl.dot(inner, b.to(tl.float32), result, input_precision=PRECISION)
    return tl.reshape(result, [ROWS * LANES, VP])

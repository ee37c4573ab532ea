"""Documents packed into rows of fixed length.

Owns  which documents share a row, and the row arrays.
Reads the token arrays of tokens.py.
Never lets one document see another: each carries its number within the row, which the model resets on.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from scripts.train.tokens import Starts, Tokens

EXTRA = 4  # tokens after the row that only serve as targets: next token, and MTP depths 1 to 3
MIN_FREE = 12  # a row with less room is full
PAD_DOCUMENT = -1


def pack(lengths: npt.NDArray[np.int64], row_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return rows of document indices, best-fit in random order; longer documents count as row_tokens."""
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of rows_by_room, sorted
    for document in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length = min(int(lengths[document]), row_tokens)
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), row_tokens - length
            rows.append([document])
        else:
            room = rooms[at]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[at]
            rows[row].append(document)
            room -= length
        if room >= MIN_FREE:
            if room not in rows_by_room:
                rows_by_room[room] = []
                bisect.insort(rooms, room)
            rows_by_room[room].append(row)
    return rows


def build_rows(tokens: Tokens, starts: Starts, row_tokens: int, seed: int = 0) -> tuple[Tokens, npt.NDArray[np.int16]]:
    """Return flagged tokens and document numbers, both (rows, row_tokens + EXTRA); token 0 and PAD_DOCUMENT fill up."""
    rows = pack(np.diff(starts), row_tokens, seed)
    ids = np.zeros((len(rows), row_tokens + EXTRA), np.uint16)
    documents = np.full((len(rows), row_tokens + EXTRA), PAD_DOCUMENT, np.int16)
    for row, members in enumerate(rows):
        at = 0
        for number, document in enumerate(members):
            start, end = int(starts[document]), int(starts[document + 1])
            room = row_tokens + EXTRA if at == 0 else row_tokens - at  # only a row's single long one uses the extra
            length = min(end - start, room)
            ids[row, at : at + length] = tokens[start : start + length]
            documents[row, at : at + length] = number
            at += length
    return ids, documents

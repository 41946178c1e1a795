"""Large tensors of an answer are put together elsewhere than in the event loop, and are the same."""

from __future__ import annotations

import asyncio

import numpy as np
import orjson

from app.http.answer import as_large_json
from app.protocols.open_inference import results, size_bytes
from app.protocols.tensors import RequestedOutput


def test_rows_are_stacked_whoever_does_it():
    rows = [np.full((2, 3), number, np.float32) for number in range(4)]
    assert size_bytes(rows) == size_bytes(np.stack(rows)) == 96
    assert size_bytes([b"abc", b"d"]) == 4
    found = results([RequestedOutput("x"), RequestedOutput("predictions")], {"x": rows, "predictions": [b"a"]}, None)
    assert np.array_equal(found[0].data, np.stack(rows))
    assert (found[0].shape, found[1].shape, found[1].data) == ((4, 2, 3), (1,), [b"a"])


def test_entries_that_are_written_one_by_one_make_the_same_json():
    written = []

    class Threads:
        async def offload(self, function, *arguments):
            written.append(arguments)
            return function(*arguments)

    for entries in ([{"embedding": "AAAA"}, {"embedding": 'a"b'}], [{}]):
        written.clear()
        body, headers = asyncio.run(as_large_json(Threads(), entries, b'{"x":', b"}"))
        assert orjson.loads(body) == {"x": entries}
        assert dict(headers)[b"content-length"] == b"%d" % len(body)
        assert [each for each, *_ in written[:-1]] == entries

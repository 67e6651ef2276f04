"""Bytes that ranks print, decoded as text. Independent of where the text goes."""

from __future__ import annotations

import codecs


class Decoders:
    """Turns each rank's bytes into text, however they are cut."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}

    def decode(self, rank: int, stream: int, data: bytes, final: bool = False) -> str:
        """Return the text in these bytes, up to the last complete character."""
        decoder = self._decoders.get((rank, stream))
        if decoder is None:
            if not data:
                return ""
            decoder = self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data, final)

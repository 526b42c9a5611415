"""Broken rows of data: skipped and counted, and refused if there are many."""

from support.errors import DataError


class Broken:
    """Counts the broken rows of a source, which are skipped.

    Args:
        source: the source in messages.
        rows: what a row is called, in the plural.
        remedy: what to do if there are too many, or no rows.
    """

    def __init__(self, source: object, rows: str = "rows", remedy: str = "download it again"):
        self._source, self._rows, self._remedy = source, rows, remedy
        self._count, self._first = 0, ""

    def add(self, place: str) -> None:
        """Counts a row, as ``line 3``."""
        self._count += 1
        self._first = self._first or place

    def notes(self, total: int) -> tuple[str, ...]:
        """Notes about the broken ones of ``total`` rows.

        Raises:
            DataError: more than one in a thousand is broken, or there are none.
        """
        if not total:
            raise DataError(f"{self._source} has no {self._rows}; {self._remedy}")
        text = f"{self._source}: {self._count:,} of {total:,} {self._rows} are broken, the first at {self._first}"
        if self._count * 1000 > total:
            raise DataError(f"{text}; expected at most one in a thousand: {self._remedy}")
        return (f"{text}; they are skipped",) if self._count else ()

"""Compares lists of Structured Fields with the parser `http_sfv`.

Usage: lists.py FOLDER, with the files that the tests in Rust have written: `read.jsonl` and
`written.jsonl`.
"""

import collections
import json
import pathlib
import re
import sys

import http_sfv

DAY = 86_400_000


def members(line):
    """Returns the names and parameters of a list of strings, or `None` for other lists."""
    if not line.isascii():
        return None
    read = http_sfv.List()
    try:
        read.parse(line.encode())
    except ValueError:
        return None
    if not len(read) or not all(isinstance(item, http_sfv.Item) and type(item.value) is str for item in read):
        return None
    return [(item.value, dict(item.params)) for item in read]


def thousandths(value):
    is_number = type(value) in (int, float) or type(value).__name__ == "Decimal"
    return round(value * 1000) if is_number else None


def expected_pause(line):
    """Returns the latest reset of the limits of which nothing remains, in milliseconds."""
    resets = [
        thousandths(params.get("t"))
        for _, params in members(line) or []
        if thousandths(params.get("r")) == 0 and (thousandths(params.get("t")) or 0) > 0
    ]
    return min(max(resets), DAY) if resets else None


def compare(path, ours, theirs):
    lines = [json.loads(line) for line in path.open()]
    different = []
    for line in lines:
        try:
            found = theirs(line)
        except Exception as error:  # the parser's own bugs
            found = f"{type(error).__name__}: {error}"
        if found != ours(line):
            different.append((line["list"], ours(line), found))
    return len(lines), different


def reason(line):
    """Returns the reason for which `http_sfv` is known to differ on a list."""
    if any(len(encoded) % 4 for encoded in re.findall("=:([A-Za-z0-9+/=]*):", line)):
        return "http_sfv rejects byte sequences without padding. RFC 9651, section 4.2.7, says that it should not."
    if re.search(r"=-?\d+\.(?!\d)", line):
        return "http_sfv accepts a number that ends with a point. RFC 9651 has digits after it."
    if re.search(r"=-?0\d{15,}", line):
        return "http_sfv accepts an integer of more than 15 digits that begins with zeros. RFC 9651 counts the digits."
    if re.search(r"%[0-9a-f]?[ \t][0-9a-f]?", line) and '=%"' in line:
        return "http_sfv accepts white space for a digit of percent-encoding."
    if re.search(r"=@-?\d{10,}", line):
        return "http_sfv rejects a date that Python's datetime cannot express."
    return None


def plain(value):
    return list(value) if isinstance(value, bytes) else value


def written(line):
    read = members(line["list"])
    return read and [[name, {key: plain(value) for key, value in params.items()}] for name, params in read]


def main():
    folder = pathlib.Path(sys.argv[1])
    failed = False
    for name, ours, theirs in [
        ("read by this crate", lambda line: line["pause_ms"], lambda line: expected_pause(line["list"])),
        ("that this crate writes", lambda line: line["members"], written),
    ]:
        path = folder / ("read.jsonl" if "read" in name else "written.jsonl")
        count, different = compare(path, ours, theirs)
        print(f"{count} lists {name}, and http_sfv: {len(different)} differ")
        for text, times in collections.Counter(reason(line) for line, _, _ in different).items():
            print(f"  {times}: {text or 'not explained'}")
        for line, mine, other in [case for case in different if not reason(case[0])][:20]:
            failed = True
            print(f"  {line!r}: {mine} and {other}")
    sys.exit(failed)


main()

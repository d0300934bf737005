"""Whether a zip archive is, byte for byte, laid out as ``toolkit.packing`` writes one.

``zipfile`` is a forgiving reader: it finds its directory from the end and ignores what stands before, between and
behind, so that bytes can be added to a file whose members all have the right hashes, and most fields of a header can
say anything. An engine that travels is one known file, so each field is compared with the one value it can have:

    local header, name, data      each member where the one before it ends, from byte 0 on
    central directory             where the last member ends, one entry a member, in their order
    end records                   where the directory ends; nothing behind, no comment

Sizes and hashes are checked by who reads the members. Layout and the ZIP64 fields of members and archives of 2 GiB or
more: PKWARE's APPNOTE.TXT, version 6.3, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import stat
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

#: Times are left out: this is the first one that the format can say.
EPOCH = (1980, 1, 1, 0, 0, 0)
UNIX = 3
#: The one flag that a member may have: its name is not ASCII.
UTF8 = 0x800
ATTRIBUTES = (stat.S_IFREG | 0o644) << 16
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s4B4H3I5H2I")
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_VERSIONS = (20, 45)  # 45 where sizes take 64 bits
_DATE = 1 << 5 | 1  # the first of January 1980
#: Sizes and places above it are written with 64 bits (zipfile's choice; the format could wait for 4 GiB).
WIDE_ABOVE = 2**31 - 1
_MANY, _LARGE = 0xFFFF, 0xFFFFFFFF


def odd_place(archive: zipfile.ZipFile, path: Path) -> str | None:
    """The first place of the file that is not as it is written, in words; None where all of it is."""
    at, entries = 0, []
    with path.open("rb") as file:
        for member in archive.infolist():
            if member.header_offset != at or not _header_is_plain(file, at, member):
                return f"the header of {member.filename!r}"
            at = file.tell() + member.file_size
            entries.append(_entry(member))
        if archive.start_dir != at:
            return f"{abs(archive.start_dir - at):,} bytes between the members and the directory"
        file.seek(at)
        for member, entry in zip(archive.infolist(), entries, strict=True):
            if file.read(len(entry)) != entry:
                return f"the directory entry of {member.filename!r}"
        tail = file.read(_END64.size + _LOCATOR.size + _END.size + 1)
    count, directory = len(entries), sum(map(len, entries))
    if tail in (_end(count, directory, at), _end64(count, directory, at)):
        return None
    behind = path.stat().st_size - at - directory - _END.size
    return f"{behind:,} bytes behind its end record" if tail[:_END.size] == _end(count, directory, at) else \
        "its end record"


def _entry(member: zipfile.ZipInfo) -> bytes:
    """A member's entry in the directory, as it is written."""
    large, far = member.file_size > WIDE_ABOVE, member.header_offset > WIDE_ABOVE
    numbers = [member.file_size] * 2 * large + [member.header_offset] * far
    wide = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size, place = _LARGE if large else member.file_size, _LARGE if far else member.header_offset
    version, name = 45 if wide or member.extract_version == 45 else 20, member.filename.encode()
    return _ENTRY.pack(b"PK\x01\x02", version, UNIX, version, 0, 0 if member.filename.isascii() else UTF8, 0, 0, _DATE,
                       member.CRC, size, size, len(name), len(wide), 0, 0, 0, ATTRIBUTES, place) + name + wide


def _header_is_plain(file: BinaryIO, at: int, member: zipfile.ZipInfo) -> bool:
    """Whether a local header says what the directory does. Leaves the file where the member's data begin."""
    file.seek(at)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        return False
    magic, version, flags, method, time, date, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(head)
    name, wide = member.filename.encode(), struct.pack("<2H2Q", 1, 16, member.file_size, member.file_size)
    return (magic == b"PK\x03\x04" and version in _VERSIONS and flags == member.flag_bits and method == 0 and time == 0
            and date == _DATE and crc == member.CRC and packed == size and size in (member.file_size, _LARGE)
            and file.read(name_bytes) == name and file.read(extra_bytes) == (wide if extra_bytes else b""))


def _end(count: int, directory: int, at: int) -> bytes:
    return _END.pack(b"PK\x05\x06", 0, 0, min(count, _MANY), min(count, _MANY), min(directory, _LARGE), min(at, _LARGE),
                     0)


def _end64(count: int, directory: int, at: int) -> bytes:
    return (_END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, directory, at)
            + _LOCATOR.pack(b"PK\x06\x07", 0, at + directory, 1) + _end(count, directory, at))

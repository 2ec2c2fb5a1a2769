"""Text from workers and files, made safe to show in a terminal."""

import re

_PARTS = re.compile(
    r"(?P<color>\x1b\[[0-9;:]{0,64}m)"
    r"|(?P<escape>(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: cursor, erase, modes
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x1b\\|\x9c|\x07|$)"  # OSC, DCS and friends, up to their end
    r"|\x1b[ -/]+[0-~]|\x1b[0-Z\\^-~])"
    # What is left of control characters, and those that turn the direction of text around.
    r"|(?P<control>[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069])",
    re.DOTALL,
)
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
RESET = "\x1b[0m"


def clean(text: str, *, keep_color: bool = False) -> str:
    """One line of text that can do nothing to a terminal but show itself.

    Escape sequences are removed, other control characters become visible (`^G`). With `keep_color`, colours
    stay and are reset at the end. Text without any of these, the usual case, is returned as it is.
    """
    if text.isprintable():
        return text
    shown = _PARTS.sub(_keep_color if keep_color else _drop_color, text)
    return shown + RESET if keep_color and "\x1b" in shown else shown


def _drop_color(match: re.Match[str]) -> str:
    return _reveal(match[0]) if match.lastgroup == "control" else ""


def _keep_color(match: re.Match[str]) -> str:
    return match[0] if match.lastgroup == "color" else _drop_color(match)


def _reveal(character: str) -> str:
    code = ord(character)
    if code < 0x80:
        return f"^{chr(code ^ 0x40)}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(value: object) -> str:
    """Anything as one clean line: white space, line ends too, becomes single spaces."""
    return clean(" ".join(str(value).split()))


def last_state(line: str) -> str:
    """What a line shows in the end, where carriage returns (progress bars) wrote over it."""
    if "\r" not in line:
        return line
    return line.rstrip("\r").rpartition("\r")[2]


def columns(text: str) -> int:
    """How many terminal columns a clean text takes, colours not counted."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    return sum(map(_columns_of, _COLOR.sub("", text)))


def fit(text: str, width: int) -> str:
    """As much of a clean text as fits into `width` columns, with `…` where something was cut."""
    if columns(text) <= width:
        return text
    if width <= 0:
        return ""
    taken, used = [], 0
    for character in _COLOR.sub("", text):
        used += _columns_of(character)
        if used >= width:
            break
        taken.append(character)
    return "".join(taken) + "…"


def _columns_of(character: str) -> int:
    if character.isascii():
        return 1
    from unicodedata import combining, east_asian_width

    return 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1

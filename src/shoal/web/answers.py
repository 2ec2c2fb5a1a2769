"""JSON in, JSON out: how those who ask are answered, and how they are told what they asked wrongly."""

import gzip
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.spec.errors import UserError

MAX_BODY_BYTES = 4096
_GZIP_FROM = 1400


def answer(request: Request, value: Any, status: int = 200) -> Response:
    """Any value as JSON, numbers that JSON does not have as null; compressed where it is worth it."""
    return answer_bytes(request, msgspec.json.encode(value), status)


def answer_bytes(request: Request, body: bytes, status: int = 200) -> Response:
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    if len(body) > _GZIP_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 1, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers)


def answer_error(request: Request, error: UserError, status: int = 400) -> Response:
    return answer(request, {"error": {"message": error.message, "why": error.why, "hint": error.hint}}, status)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """A JSON object that is not too large."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise UserError("The request is too long.", why=f"more than {max_bytes} bytes")
    try:
        value = msgspec.json.decode(data or b"{}")
    except (msgspec.MsgspecError, RecursionError):
        raise UserError("The request is not JSON.") from None
    if not isinstance(value, dict):
        raise UserError("The request is not a JSON object.")
    return value


def whole(params: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A whole number of the address, within bounds."""
    found = whole_or_none(params, name)
    return default if found is None else min(max(found, least), most)


def whole_or_none(params: Mapping[str, str], name: str) -> int | None:
    text = params.get(name, "")
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise UserError(f"{name} is not a whole number.")
    return int(text)

"""The API described for other programs, as OpenAPI 3.1: what can be asked, and what is answered."""

from typing import Any

from shoal.version import __version__

_TEXT, _NUMBER, _WHOLE, _FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
_ANY = {"type": "object"}

JOB_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "args": ({"type": "array", "items": _TEXT}, "arguments of `shoal run`: the script and what it is given"),
    "dir": (_TEXT, "the folder it runs in, on the machine with the service"),
    "name": (_TEXT, "what it is called; the script's name if left out"),
    "env": ({"type": "object", "additionalProperties": _TEXT}, "variables of its workers"),
    "workers": ({"oneOf": [_WHOLE, _TEXT]}, '4, or "1:8" for a job whose workers may come and go'),
    "class": ({"enum": ["batch", "training", "interactive", "serving"]}, "how urgent it is"),
    "priority": (_WHOLE, "the higher the earlier, within its class"),
    "partition": (_TEXT, "which part of the nodes"),
    "account": (_TEXT, "whose share it counts to"),
    "cores": (_NUMBER, "cores of each worker"),
    "memory": ({"oneOf": [_WHOLE, _TEXT]}, 'memory of each worker: bytes, or "4G"'),
    "gpus": (_NUMBER, "GPUs of each worker; below one a share of one"),
    "disk": ({"oneOf": [_WHOLE, _TEXT]}, 'room on the disk for each worker: bytes, or "20G"'),
    "kinds": ({"type": "array", "items": _TEXT}, "kinds of nodes it can run on; any if empty"),
    "data": ({"type": "array", "items": _TEXT}, "files and folders it reads: nodes that have them are preferred"),
    "time": (_TEXT, 'how long it may run: "2h"'),
    "after": (
        {"type": "array", "items": {"oneOf": [_WHOLE, _TEXT]}},
        'jobs that must have finished well before: numbers, "17-26", names',
    ),
    "array": (_WHOLE, "so many copies, told apart by SHOAL_ARRAY_INDEX"),
    "preemptible": (_FLAG, "whether it may be stopped for others, and go on later"),
    "max_preemptions": (_WHOLE, "how often it may be stopped for others"),
}

_JOBS = {"type": "array", "items": {"oneOf": [_WHOLE, _TEXT]}}
_BODIES: dict[str, dict[str, Any]] = {
    "submit": {"jobs": {"type": "array", "items": {"$ref": "#/components/schemas/Job"}}, "held": _FLAG},
    "change": {
        "verb": {"enum": ["cancel", "hold", "release", "requeue", "resize"]},
        "jobs": _JOBS,
        "workers": {"oneOf": [_WHOLE, _TEXT]},
    },
    "drain": {"is_draining": _FLAG, "why": _TEXT},
    "person": {"role": _TEXT, "account": _TEXT, "max_jobs": _WHOLE, "max_workers": _WHOLE},
    "token": {"digest": _TEXT, "days": _NUMBER},
    "nothing": {},
}

_CALLS = (
    ("post", "/api/jobs", "Submit jobs, all or none", "submit", ()),
    ("patch", "/api/jobs", "Cancel, hold, release, requeue or resize jobs", "change", ()),
    ("get", "/api/jobs/{number}", "One job", "", ()),
    ("get", "/api/queue", "The queue", "", ("owner", "state", "search", "all", "limit", "offset")),
    ("get", "/api/nodes", "The nodes, and what is free on them", "", ()),
    ("patch", "/api/nodes/{node}", "Start nothing new on a node, or use it again", "drain", ()),
    ("get", "/api/people", "People and what they have in the queue", "", ()),
    ("put", "/api/people/{name}", "Let somebody in, or change what they may do", "person", ()),
    ("delete", "/api/people/{name}", "Let somebody in no more", "nothing", ()),
    ("post", "/api/people/{name}/tokens", "A token for somebody, by its digest", "token", ()),
    ("delete", "/api/tokens/{id}", "Revoke a token", "nothing", ()),
    ("get", "/api/share", "Who used how much", "", ()),
    ("get", "/api/audit", "Who did what", "", ("after", "limit", "verify", "expect")),
    ("get", "/api/me", "Who you are", "", ()),
    ("get", "/api/health", "How the service is", "", ()),
    ("get", "/api/openapi.json", "This description", "", ()),
)


def describe() -> dict[str, Any]:
    """The whole description. Pure."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body, queries in _CALLS:
        paths.setdefault(path, {})[method] = _call(path, summary, body, queries)
    properties = {name: {**schema, "description": about} for name, (schema, about) in JOB_FIELDS.items()}
    error = dict.fromkeys(("message", "why", "hint"), _TEXT)
    return {
        "openapi": "3.1.0",
        "info": {"title": "shoal service", "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Job": {
                    "type": "object",
                    "required": ["args", "dir"],
                    "properties": properties,
                    "additionalProperties": False,
                },
                "Error": {"type": "object", "properties": {"error": {"type": "object", "properties": error}}},
            },
        },
    }


def _call(path: str, summary: str, body: str, queries: tuple[str, ...]) -> dict[str, Any]:
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named
    ]
    parameters += [{"name": name, "in": "query", "required": False, "schema": _TEXT} for name in queries]
    wrong = {
        "description": "what is wrong, why, and what to do",
        "content": _json({"$ref": "#/components/schemas/Error"}),
    }
    call: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "done", "content": _json(_ANY)}, "4XX": wrong, "5XX": wrong},
    }
    if body:
        about = "a new text for each change: a second request with the same one is answered like the first"
        key = {"name": "Idempotency-Key", "in": "header", "required": True, "schema": _TEXT, "description": about}
        parameters.append(key)
        call["requestBody"] = {"content": _json({"type": "object", "properties": _BODIES[body]})}
    return {**call, "parameters": parameters}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
